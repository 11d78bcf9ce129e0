"""Why a plan is what it is: predicted loss and price of each choice, and the verdict of held-out text on the whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from .record import GREATEST, PlanError, read_fields

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
