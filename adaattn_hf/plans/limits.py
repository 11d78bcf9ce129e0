"""The limits of a plan, and the one judgement of its figures: in calibration, by `adaattn verify` and at load.

Whoever judges a plan takes no limit from it. A calibration may be stricter than `Gates.loosest`, as its user asks or
its model shows, and never looser: what it verified is believed at load.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from . import wording
from .evidence import LEVEL, LOST, Verified
from .wording import at_most, in_nats, rise, share, signed_nats

if TYPE_CHECKING:
    from .plan import Plan

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
    def loosest(cls, budget: float, dtype: str) -> Gates:
        """Returns the limits of a budget that nobody may loosen, for a model of that dtype."""
        return cls(budget, needles=LOST, rounding=most_rounding(dtype), by_chance=True)

    def with_flips(self, per_root_kl: float, stock: float) -> Gates:
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
                f"the perplexity may rise by {at_most(upper)}, {wording.allowed(self.budget)} is allowed (the upper "
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
        f"{wording.allowed(gates.budget)} (Δnll {signed_nats(proof.delta_nll)}, at most {signed_nats(proof.upper)} at "
        f"{share(proof.confidence, 2)}, budget {in_nats(gates.budget)} nats/token; mean KL {in_nats(proof.kl)}, "
        f"allowed {in_nats(gates.most_kl)})"
    )


def unproven(plan: Plan) -> str | None:
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


def verdict_of(plan: Plan) -> str:
    """Returns in words what held-out text has shown of a plan, by its figures and not by what it says of them."""
    reason = unproven(plan)
    if reason is not None:
        return f"not verified: the plan {reason}"
    if plan.verified is None:
        return "every layer is exact"
    return words(plan.verified, Gates.loosest(plan.budget, plan.dtype))
