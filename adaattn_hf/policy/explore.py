"""What every budget would buy: the solver's table, kept with a plan, solved again along a scale of budgets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..plans.page import proof, rounded
from ..plans.plan import Plan
from .knapsack import Allocation, Array, Launches, allocate, evaluate, shared_prices, worst_length

__all__ = ["BUDGETS", "SolverTable", "explorer"]

BUDGETS = tuple(math.log1p(lead * 10.0**power) for power in range(-5, 0) for lead in (1, 1.5, 2, 3, 5, 7))
"""Losses that the slider allows, nats/token: rises of the perplexity of 0.001 % to 70 %."""


@dataclass(frozen=True, eq=False)
class SolverTable:
    """What the solver chooses by.

    Attributes:
        units: Layer and key/value head of each unit, layer by layer.
        choices: Labels of the choices, exact first.
        prices: `[units, choices]`, seconds; infinite is no choice.
        risks: `[lengths, units, choices]`, nats/token, re-scaled by what whole plans lost.
        launches: Fixed costs of launches.
        kept: `[units, choices]`, tokens of a sequence of the longest length that a streaming cache keeps; None where
            that was not recorded, or the model keeps no cache.
    """

    units: Sequence[tuple[int, int]]
    choices: Sequence[str]
    prices: Array
    risks: Array
    launches: Launches
    kept: NDArray[np.int64] | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON values; what is infinite is null."""
        return {
            "units": [list(unit) for unit in self.units],
            "choices": list(self.choices),
            "prices": _finite(self.prices),
            "risks": _finite(self.risks),
            "launch": self.launches.launch.tolist(),
            "constant": self.launches.constant.tolist(),
            "kept": None if self.kept is None else self.kept.tolist(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SolverTable:
        """The table that `to_dict` wrote.

        Raises:
            ValueError: It is none, or its shapes disagree.
        """
        try:
            units = [(int(layer), int(head)) for layer, head in data["units"]]
            choices = [str(name) for name in data["choices"]]
            prices, risks = _infinite(data["prices"]), _infinite(data["risks"])
            launch = np.array(data["launch"], dtype=np.int64)
            constant = np.array(data["constant"], dtype=float)
            kept = None if data.get("kept") is None else np.array(data["kept"], dtype=np.int64)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"table: not one that `adaattn calibrate` wrote ({error!r}); calibrate again"
            ) from error
        shape = (len(units), len(choices))
        if (
            prices.shape != shape
            or risks.shape[1:] != shape
            or launch.shape != shape[1:]
            or not (kept is None or (kept.shape == shape and kept[:, 0].all()))
        ):
            raise ValueError(
                f"table: {shape[0]} units and {shape[1]} choices, but prices {prices.shape}, risks {risks.shape}, "
                f"kept tokens {None if kept is None else kept.shape}; calibrate again"
            )
        layers = np.array([layer for layer, _ in units], dtype=np.int64)
        return cls(units, choices, prices, risks, Launches(layers, launch, constant), kept)

    def solve(self, budget: float) -> Allocation:
        """Returns the cheapest allocation whose predicted loss is within a budget in nats/token at every length."""
        limit = np.full(len(self.risks), budget)
        return allocate(self.prices, self.risks, limit, self.launches)


def _finite(values: Array) -> Any:
    nested: Any = values.tolist()

    def entry(value: Any) -> Any:
        if isinstance(value, list):
            return [entry(item) for item in value]
        return value if math.isfinite(value) else None

    return entry(nested)


def _infinite(values: Any) -> Array:
    return np.asarray(np.nan_to_num(np.array(values, dtype=float), nan=np.inf, posinf=np.inf))


def explorer(table: SolverTable, plan: Plan, about: Sequence[str]) -> dict[str, Any]:
    """Returns what the page of a calibration shows: the solver's plan at every budget, and the one that was proved.

    Args:
        table: What the solver chose by.
        plan: The plan of the calibration.
        about: Lines below the heading.
    """
    exact = np.zeros(len(table.units), dtype=np.int64)
    base = evaluate(exact, table.prices, table.risks, table.launches)
    stops = [_stop("exact", table, base, base.price)]
    for budget in BUDGETS:
        found = table.solve(budget)
        stop = _stop(f"{100 * math.expm1(budget):.3g} %", table, found, base.price)
        if stop["picks"] != stops[-1]["picks"]:
            stops.append({**stop, "budget": budget})
    start = len(stops) // 2
    if plan.verified is not None and not plan.is_exact:
        own = evaluate(_picks(table, plan), table.prices, table.risks, table.launches)
        name = f"the plan of {100 * math.expm1(plan.budget):.3g} %"
        stop = {**_stop(name, table, own, base.price), "proof": proof(plan)}
        start = next((at for at, one in enumerate(stops) if one["loss"] > stop["loss"]), len(stops))
        stops.insert(start, stop)
    heads = len(table.units) // len(set(table.launches.layer.tolist()))
    each = table.prices + table.launches.constant[table.launches.launch] / heads
    risks = table.risks.max(axis=0)
    return {
        "title": f"What a loss budget buys: {plan.model_type}",
        "about": list(about),
        "rows": list(dict.fromkeys(layer for layer, _ in table.units)),
        "width": heads,
        "choices": list(table.choices),
        "stops": stops,
        "start": start,
        "offers": {"risk": _short(risks), "time": _short(each / each[:, :1])},
        "compared": False,
    }


def _short(values: Array) -> list[list[float | None]]:
    return [[rounded(v) if math.isfinite(v) else None for v in row] for row in values.tolist()]


def _picks(table: SolverTable, plan: Plan) -> NDArray[np.int64]:
    """The places of a plan's choices in the table.

    Raises:
        ValueError: The plan takes what the table does not offer: they are of different calibrations.
    """
    chosen = {
        (layer.layer, head): choice.label
        for layer in plan.layers
        for head, choice in enumerate(layer.choices)
    }
    strange = sorted({name for name in chosen.values() if name not in table.choices})
    if strange or not set(chosen) <= set(table.units):
        raise ValueError(
            f"plan: takes {', '.join(strange) or 'heads'} that its report does not hold; give the directory of one "
            "calibration"
        )
    return np.array([table.choices.index(chosen.get(unit, table.choices[0])) for unit in table.units])


def _stop(name: str, table: SolverTable, found: Allocation, base: float) -> dict[str, Any]:
    """One plan on the page."""
    exact = np.zeros_like(found.picks)
    units = np.arange(len(exact))
    price, full = (shared_prices(picks, table.prices, table.launches) for picks in (found.picks, exact))
    return {
        "name": name,
        "picks": found.picks.tolist(),
        "risk": [rounded(v) for v in worst_length(table.risks, found.picks).tolist()],
        "time": [rounded(v) for v in (price / full).tolist()],
        "loss": rounded(float(found.risk.max())),
        "speed": rounded(base / found.price),
        "memory": None
        if table.kept is None
        else rounded(float(table.kept[units, found.picks].sum() / table.kept[:, 0].sum())),
        "proof": None,
    }
