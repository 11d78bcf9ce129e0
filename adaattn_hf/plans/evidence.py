"""Why a plan is what it is: predicted loss and price of each choice, and the verdict of held-out text on the whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from .record import PlanError, read_record, real, share, text, whole

MODEL = "model"
"""Key in a plan's protocol: the name of the model that it was made for."""
SOURCES = "held_out_sources"
"""Key in a plan's protocol: how many sources of held-out text each keep the budget."""
LEVEL = 0.95
"""Least confidence level of a bound that is believed."""
LOST = 0.5
"""Largest share of the needles that a user may allow to be lost."""
MOST_LAYERS, MOST_HEADS = 1 << 12, 1 << 12
"""More layers and key/value heads than any model has."""
USUAL_NEEDLES, MOST_NEEDLES = 64, 1 << 12
"""Needles that calibrations ask for by default, and more than any asks for."""
SHORTEST = 1e-30
"""Shortest time in a plan, seconds, so that ratios of times stay finite."""


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

    layer: int
    head: int
    risk: float
    price: float
    exact_price: float
    dropped_mass: float
    dropped_mass_p95: float
    dropped_square: float

    def __post_init__(self) -> None:
        """Refuse values that are not numbers, or are negative."""
        whole(self.layer, "units: layer", most=MOST_LAYERS)
        whole(self.head, "units: head", most=MOST_HEADS)
        for field in fields(self)[2:]:
            value = real(getattr(self, field.name), f"units: {field.name}", 0.0)
            if "price" in field.name and 0.0 < value < SHORTEST:
                raise PlanError(f"units: {field.name} is {value!r}, expected 0 or at least {SHORTEST:g} seconds")


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
    confidence: float
    tries: int
    documents: int
    tokens: int
    kl: float
    kl_p999: float
    top1: float
    retrieval_stock: float | None
    retrieval_plan: float | None
    activation: float
    activation_keys: float
    predicted_kl: float
    sentence: str
    needles: int = 0
    needles_lost: int = 0

    def __post_init__(self) -> None:
        """Refuse values of the wrong type, out of range, or that contradict one another."""
        if not isinstance(self.passed, bool):
            raise PlanError(f"verified.passed is {self.passed!r}, expected true or false")
        text(self.sentence, "verified.sentence")
        for name in ("tries", "documents", "tokens"):
            whole(getattr(self, name), f"verified.{name}", least=1, most=1 << 53)
        for name in ("confidence", "top1", "activation", "activation_keys"):
            share(getattr(self, name), f"verified.{name}")
        for name in ("retrieval_stock", "retrieval_plan"):
            if getattr(self, name) is not None:
                share(getattr(self, name), f"verified.{name}")
        for name in ("kl", "kl_p999", "predicted_kl"):
            real(getattr(self, name), f"verified.{name}", 0.0)
        whole(self.needles, "verified.needles", most=MOST_NEEDLES)
        whole(self.needles_lost, "verified.needles_lost", most=MOST_NEEDLES)
        lost, won, retrieved = self.compared
        if lost > retrieved or won < 0 or lost + won > MOST_NEEDLES:
            raise PlanError(f"verified.needles_lost is {lost}, expected a number that the shares retrieved allow")
        mean, upper = real(self.delta_nll, "verified.delta_nll"), real(self.upper, "verified.upper")
        if upper < mean:
            raise PlanError(f"verified.upper is {upper!r}, expected a bound of at least delta_nll, {mean!r}")

    @classmethod
    def from_dict(cls, data: Any, where: str) -> Verified:
        """Returns the verdict written by `asdict`, in older files without counts of needles; else a PlanError."""
        known = {"needles": 0, "needles_lost": 0, **data} if isinstance(data, Mapping) else data
        return cls(**read_record(cls, known, where))

    @property
    def compared(self) -> tuple[int, int, int]:
        """How many needles only stock attention retrieves, how many only the plan, and how many stock attention."""
        asked = self.needles or USUAL_NEEDLES
        stock, plan = (round(asked * (one or 0.0)) for one in (self.retrieval_stock, self.retrieval_plan))
        lost = self.needles_lost if self.needles else max(stock - plan, 0)
        return lost, lost + plan - stock, stock
