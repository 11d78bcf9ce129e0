"""The figures of a plan, its limits, and the one judgement by these: in calibration, by `adaattn verify` and at load.

Figures are the predicted loss and price of each choice, and the verdict of held-out text on the whole.

Whoever judges a plan takes no limit from it. A calibration may be stricter than `Gates.loosest`, as its user asks or
its model shows, and never looser: what it verified is believed at load.
"""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Self

from .record import GREATEST, PlanError, read_fields
from .wording import allowed, at_most, in_nats, rise, share, signed_nats

if TYPE_CHECKING:
    from .plan import Plan

MODEL = "model"
"""Key in a plan's protocol: the name of the model that it was made for."""
SOURCES = "held_out_sources"
"""Key in a plan's protocol: how many sources of held-out text each keep the budget."""
LEVEL = 0.95
"""Least confidence level of a bound that is believed."""
LOST = 0.5
"""Largest share of the needles that a user may allow to be lost."""
MOST_LAYERS = MOST_HEADS = 1 << 12
"""More layers and key/value heads than any model has."""
USUAL_NEEDLES, MOST_NEEDLES = 64, 1 << 12
"""Needles that calibrations ask for by default, and more than any asks for."""
SHORTEST = 1e-30
"""Shortest time in a plan, seconds, so that ratios of times stay finite."""
LEAST_DOCUMENTS, LEAST_TOKENS = 2, 32
"""What a verdict must at least rest on: one document has no spread."""
FLIPS = 2.0
"""Most top-1 flips per token and square root of the KL that any model's law may allow; trained models have less."""
ROUNDING, ROUNDING_IN_HALF = 1e-6, 5e-3
"""Largest mean KL that rounding may explain, nats/token: by dtype of the model, half precision or more."""
SLACK = 1.5
"""Tolerated top-1 flips, as a multiple of those that the model's loss law predicts at the budget."""
SIGNIFICANT = 0.05
"""Significance level of the sign test on lost needles."""
NEEDLES = 0.02
"""Largest net share of the needles retrieved by stock attention that may be lost."""

Index = Annotated[int, (0, MOST_LAYERS)]
Amount = Annotated[float, (0.0, GREATEST)]
Share = Annotated[float, (0.0, 1.0)]
Count = Annotated[int, (1, 1 << 53)]
Needles = Annotated[int, (0, MOST_NEEDLES)]


@dataclass(frozen=True)
class UnitRecord:
    """Predicted loss and price of a unit's choice.

    Attributes:
        layer: Layer index.
        head: Key/value head.
        risk: Predicted loss of the choice in nats/token, re-scaled by the measured loss of whole plans, at the length
            bin where the whole plan's is largest.
        price: Measured seconds of the choice for a prefill of every length, with its decode steps unless they stay
            exact; heads of a launch share its fixed cost.
        exact_price: The same for the exact choice.
        dropped_mass: Mean loss of a calibration row: the attention mass that the choice drops, plus the relative
            change of the output by rounded or projected operands.
        dropped_mass_p95: Its 95th percentile; the monitor makes a head exact above three times this value.
        dropped_square: Its mean square; risk / dropped_square converts a loss seen at run time into a KL.
    """

    layer: Index
    head: Index
    risk: Amount
    price: Amount
    exact_price: Amount
    dropped_mass: Amount
    dropped_mass_p95: Amount
    dropped_square: Amount

    def __post_init__(self) -> None:
        read_fields(self)
        for name, price in (("price", self.price), ("exact_price", self.exact_price)):
            if 0.0 < price < SHORTEST:
                raise PlanError(f"{name} is {price!r}, expected 0 or at least {SHORTEST:g} seconds")


@dataclass(frozen=True)
class Verified:
    """The verdict of held-out text on a plan.

    Attributes:
        passed: Whether every gate was passed.
        delta_nll: Mean paired difference plan - stock, nats/token.
        upper: Its one-sided upper confidence bound, clustered by document.
        confidence: Level of the bound; in older files that of all plans that might fail, shared among them.
        tries: How many plans the text had judged, including this one.
        documents: Held-out documents that the bound tells apart, or stretches of text where there are too few; of the
            source with the largest bound.
        tokens: Scored tokens.
        kl: Mean KL(stock || plan), nats/token.
        kl_p999: Its 99.9th percentile.
        top1: Share of tokens where both agree on the likeliest token.
        retrieval_stock: Share of needles that stock attention retrieves; `None` if none were tested, as for models
            that do not generate.
        retrieval_plan: Share of needles that the plan retrieves.
        activation: Share of (token, query head) pairs that the plan does not compute exactly.
        activation_keys: Share of pairs that see fewer keys, which perplexity on short text cannot test.
        predicted_kl: The sum of the risks, re-scaled.
        sentence: The verdict in the calibration's words; what is shown of a stored verdict is told by its figures.
        needles: Needles that were asked for; 0 in older files, which keep the shares alone.
        needles_lost: Those that stock attention alone retrieves.
    """

    passed: bool
    delta_nll: float
    upper: float
    confidence: Share
    tries: Count
    documents: Count
    tokens: Count
    kl: Amount
    kl_p999: Amount
    top1: Share
    retrieval_stock: Share | None
    retrieval_plan: Share | None
    activation: Share
    activation_keys: Share
    predicted_kl: Amount
    sentence: str
    needles: Needles = 0
    needles_lost: Needles = 0

    def __post_init__(self) -> None:
        read_fields(self)
        lost, won, retrieved = self.compared
        if lost > retrieved or won < 0 or lost + won > MOST_NEEDLES:
            raise PlanError(f"needles_lost is {lost}, expected a number that the shares retrieved allow")
        if self.upper < self.delta_nll:
            raise PlanError(f"upper is {self.upper!r}, expected a bound of at least delta_nll, {self.delta_nll!r}")

    @property
    def compared(self) -> tuple[int, int, int]:
        """How many needles only stock attention retrieves, how many only the plan, and how many stock attention."""
        needles = self.needles or USUAL_NEEDLES
        stock, plan = (round(needles * (share or 0.0)) for share in (self.retrieval_stock, self.retrieval_plan))
        lost = self.needles_lost if self.needles else max(stock - plan, 0)
        return lost, lost + plan - stock, stock


@dataclass(frozen=True)
class Gates:
    """Limits that a plan must keep.

    The budget limits the loss. Unless the user sets them, the other limits follow from it: the share of tokens whose
    top-1 prediction flips grows with the square root of the KL, by a factor measured on this model, and is never held
    below that between two stock implementations.

    Attributes:
        budget: Upper bound of the loss difference, nats/token; the mean KL keeps it too, beyond what rounding adds.
        top1: Smallest share of tokens with the same top-1 prediction.
        needles: Largest net share of stock attention's needles that may be lost. `None`: `NEEDLES`, and a larger loss
            fails only where chance does not explain it.
        rounding: Mean KL between two stock implementations in the model's dtype, nats/token.
        by_chance: Whether needles that chance may have lost are forgiven though the user set a limit.
        max_kl: Largest mean KL beyond what rounding adds, nats/token, where the user wants less than the budget.
    """

    budget: float
    top1: float = 0.0
    needles: float | None = None
    rounding: float = 0.0
    by_chance: bool = False
    max_kl: float | None = None

    @classmethod
    def loosest(cls, budget: float, dtype: str) -> Self:
        """Returns the limits of a budget that nobody may loosen, for a model of that dtype."""
        return cls(budget, needles=LOST, rounding=most_rounding(dtype), by_chance=True)

    def with_flips(self, per_root_kl: float, stock: float) -> Self:
        """Returns the gates with a limit on top-1 flips where the user set none.

        Both are flips per token: over the square root of the KL on this model, and between two stock implementations.
        """
        if self.top1 > 0.0:
            return self
        return replace(self, top1=1.0 - max(SLACK * per_root_kl * math.sqrt(self.most_kl), stock))

    @property
    def most_kl(self) -> float:
        """Largest mean KL, nats/token."""
        return min(self.budget, self.max_kl or self.budget) + self.rounding

    @property
    def least_top1(self) -> float:
        """Smallest share of tokens with the same top-1 prediction, whatever the user or the model allow."""
        return max(self.top1, 1.0 - SLACK * FLIPS * math.sqrt(self.most_kl))

    def refusals(self, proof: Verified) -> tuple[str, ...]:
        """Returns a sentence for each limit that the figures of a verdict do not keep, whatever it says of itself."""
        reasons = []
        if proof.confidence < LEVEL - 1e-9:
            reasons.append(f"the bound is at {share(proof.confidence, 2)}, below {share(LEVEL)}")
        if proof.documents < LEAST_DOCUMENTS or proof.tokens < LEAST_TOKENS:
            reasons.append(
                f"it rests on {proof.documents} documents with {proof.tokens} tokens, fewer than {LEAST_DOCUMENTS} and "
                f"{LEAST_TOKENS}"
            )
        return (*reasons, *self.failures(proof.upper, proof.kl, proof.top1, *proof.compared))

    def failures(self, upper: float, kl: float, top1: float, lost: int, won: int, retrieved: int) -> tuple[str, ...]:
        """Returns a sentence for each gate that is not passed.

        Needles are those that only stock attention retrieves (`lost`), only the plan (`won`), and stock (`retrieved`).
        """
        reasons = []
        if not upper <= self.budget:
            reasons.append(
                f"the perplexity may rise by {at_most(upper)}, {allowed(self.budget)} is allowed (the upper "
                f"bound of Δnll is {in_nats(upper)} nats/token, above {in_nats(self.budget)})"
            )
        if not kl <= self.most_kl:
            reasons.append(
                f"predictions differ too much (mean KL {in_nats(kl)} nats/token, above {in_nats(self.most_kl)})"
            )
        if not top1 >= self.least_top1:
            reasons.append(f"the likeliest token agrees on {share(top1, 2)}, below {share(self.least_top1, 2)}")
        if self.forgets(lost, won, retrieved):
            reasons.append(f"{lost - won} of {retrieved} needles are lost, more than {self.spared(retrieved)}")
        return tuple(reasons)

    def spared(self, retrieved: int) -> int:
        """Returns how many of the needles that stock attention retrieves may be lost."""
        return math.ceil((NEEDLES if self.needles is None else self.needles) * retrieved)

    def forgets(self, lost: int, won: int, retrieved: int, level: float = SIGNIFICANT) -> bool:
        """Whether too many needles are lost; where the user set no limit, more than chance explains at a level."""
        if lost - won <= self.spared(retrieved):
            return False
        changed = lost + won  # the sign test: as many or more of them lost, where either is as likely
        chance = sum(math.comb(changed, number) for number in range(lost, changed + 1)) / 2**changed
        return (self.needles is not None and not self.by_chance) or chance <= level

    def nearest(self, upper: float, kl: float, top1: float) -> tuple[str, float]:
        """Returns the name of the gate nearest to its limit, and which share of the limit was used."""
        shares = {
            "the bound of the increase": upper / self.budget,
            "the mean KL": kl / self.most_kl,
            "the likeliest token": (1.0 - top1) / (1.0 - self.least_top1) if self.least_top1 < 1.0 else math.inf,
        }
        name = max(shares, key=shares.__getitem__)
        return name, shares[name]


def most_rounding(dtype: str) -> float:
    """Returns the largest mean KL that rounding may explain in a dtype, nats/token."""
    return ROUNDING_IN_HALF if dtype in ("bfloat16", "float16") else ROUNDING


def words(proof: Verified, gates: Gates) -> str:
    """Returns the figures of a verdict that passed, and the limits on loss and KL that they keep, for a reader."""
    return (
        f"passed: perplexity {rise(proof.delta_nll)}, at most {at_most(proof.upper)}, allowed "
        f"{allowed(gates.budget)} (Δnll {signed_nats(proof.delta_nll)}, at most {signed_nats(proof.upper)} at "
        f"{share(proof.confidence, 2)}, budget {in_nats(gates.budget)} nats/token; mean KL {in_nats(proof.kl)}, "
        f"allowed {in_nats(gates.most_kl)})"
    )


def unproven(plan: "Plan") -> str | None:
    """Returns why held-out text has not shown a plan good, or the format of its cache, None where it has."""
    proofs = [] if plan.is_exact else [("", plan.verified)]
    if plan.cache is not None and plan.cache[0] != "model":
        proofs.append((f" over its cache in {plan.cache[0]}", plan.cache_verified))
    gates = Gates.loosest(plan.budget, plan.dtype)
    for over, proof in proofs:
        if proof is None:
            return f"was never verified on held-out text{over}"
        if not proof.passed:
            return f"failed on held-out text{over}"
        reasons = gates.refusals(proof)
        if not proof.sentence.startswith("passed"):
            reasons = (*reasons, f"its sentence is {proof.sentence!r:.60}")
        if reasons:
            return f"contradicts its own verification{over}: it says that it passed, but {'; '.join(reasons)}"
    return None


def verdict_of(plan: "Plan") -> str:
    """Returns in words what held-out text has shown of a plan, by its figures and not by what it says of them."""
    reason = unproven(plan)
    if reason is not None:
        return f"not verified: the plan {reason}"
    if plan.verified is None:
        return "every layer is exact"
    return words(plan.verified, Gates.loosest(plan.budget, plan.dtype))
