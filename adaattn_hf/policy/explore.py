"""Solves a calibration again for a range of budgets, from the table of prices and risks that is kept with its plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..plans.headline import Bought, headline, name_of
from ..plans.page import proof, rounded
from ..plans.plan import Plan
from ..plans.render import details, notes
from ..plans.wording import allowed, legend_of_labels
from .knapsack import Allocation, Array, Launches, allocate, evaluate, of_cache, shared_prices, worst_length

BUDGETS = tuple(math.log1p(lead * 10.0**power) for power in range(-5, 0) for lead in (1, 1.5, 2, 3, 5, 7))
"""Budgets on the page's slider, nats/token: perplexity increases of 0.001 % to 70 %."""


@dataclass(frozen=True, eq=False)
class SolverTable:
    """Prices and risks of all choices, from which the solver chooses.

    Attributes:
        units: Layer and key/value head of each unit, layer by layer.
        choices: Labels of the choices, exact first.
        prices: `[units, choices]`, seconds; infinite where a choice is not offered.
        risks: `[lengths, units, choices]`, nats/token, rescaled to the measured loss of whole plans.
        launches: Fixed costs of launches.
        kept: `[units, choices]`, tokens that a streaming cache keeps of a sequence of the longest length; None where
            that was not recorded, or the model has no cache.
    """

    units: Sequence[tuple[int, int]]
    choices: Sequence[str]
    prices: Array
    risks: Array
    launches: Launches
    kept: NDArray[np.int64] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The table as JSON values; infinite numbers become null."""
        constant, kind = np.unique(self.launches.constant, axis=1, return_inverse=True)
        return {
            "units": [list(unit) for unit in self.units],
            "choices": list(self.choices),
            "prices": _finite(self.prices),
            "risks": _finite(self.risks),
            "launch": self.launches.launch.tolist(),
            "kind": kind.ravel().tolist(),
            "constant": constant.tolist(),
            "kept": None if self.kept is None else self.kept.tolist(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SolverTable:
        """Reads a table written by `to_dict`.

        Raises:
            ValueError: It is not such a table, or its shapes disagree.
        """
        try:
            units = [(int(layer), int(head)) for layer, head in data["units"]]
            choices = [str(name) for name in data["choices"]]
            prices, risks = _infinite(data["prices"]), _infinite(data["risks"])
            launch = np.array(data["launch"], dtype=np.int64)
            constant = np.array(data["constant"], dtype=float)
            if constant.ndim == 1:
                # older reports hold one number a choice or a launch, for all layers and calls
                each = constant if len(constant) == len(launch) else constant[launch]
                constant, kind = each[None, None], np.zeros(len(units), dtype=np.int64)
            else:
                kind = np.array(data["kind"], dtype=np.int64)
            constant = constant[:, kind]
            kept = None if data.get("kept") is None else np.array(data["kept"], dtype=np.int64)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ValueError(
                f"table: not one that `adaattn calibrate` wrote ({error!r}); calibrate again"
            ) from error
        shape = (len(units), len(choices))
        if (
            prices.shape != shape
            or risks.shape[1:] != shape
            or launch.shape != shape[1:]
            or constant.shape[1:] != shape
            or not (np.isfinite(constant) & (constant >= 0.0)).all()
            or not (kept is None or (kept.shape == shape and kept[:, 0].all()))
        ):
            raise ValueError(
                f"table: {shape[0]} units and {shape[1]} choices, but prices {prices.shape}, risks {risks.shape}, "
                f"constants {constant.shape}, kept tokens {None if kept is None else kept.shape}; calibrate again"
            )
        layers = np.array([layer for layer, _ in units], dtype=np.int64)
        return cls(units, choices, prices, risks, Launches(layers, launch, constant), kept)

    def solve(self, budget: float, smallest: bool = False) -> Allocation:
        """Returns the allocation that a search takes whose predicted loss is within a budget at every length.

        Args:
            budget: Allowed loss, nats/token.
            smallest: Whether it looks for the smallest cache and not for the least time.
        """
        limit = np.full(len(self.risks), budget)
        if smallest and self.kept is not None:
            return allocate(of_cache(self.kept), self.risks, limit)
        return allocate(self.prices, self.risks, limit, self.launches)


def _finite(values: Array) -> Any:
    """JSON values, null for infinite numbers."""
    nested = values.astype(object)
    nested[~np.isfinite(values)] = None
    return nested.tolist()


def _infinite(values: Any) -> Array:
    return np.asarray(np.nan_to_num(np.array(values, dtype=float), nan=np.inf, posinf=np.inf))


def explorer(
    table: SolverTable, plan: Plan, buys: Bought | None = None, name: str | None = None
) -> dict[str, Any]:
    """Returns the data of a calibration's page: the solver's plan at every budget, and the plan that was proved.

    Args:
        table: Prices and risks that the solver chose from.
        plan: The plan of the calibration.
        buys: What the report beside the plan says that it buys.
        name: Name of the model in the heading; the plan's own if absent.
    """
    exact = np.zeros(len(table.units), dtype=np.int64)
    base = evaluate(exact, table.prices, table.risks, table.launches)
    stops = [_stop("exact", table, base, base.price)]
    settings = plan.protocol.get("settings", {})
    smallest = settings.get("optimize") == "memory" or settings.get("kv_bytes") is not None
    for budget in BUDGETS:
        picks = table.solve(budget, smallest).picks
        solved = evaluate(picks, table.prices, table.risks, table.launches)
        stop = _stop(allowed(budget), table, solved, base.price)
        if stop["picks"] != stops[-1]["picks"]:
            stops.append({**stop, "budget": budget})
    start = len(stops) // 2
    if plan.verified is not None and not plan.is_exact:
        proved = evaluate(_picks(table, plan), table.prices, table.risks, table.launches)
        label = f"the plan of {allowed(plan.budget)}"
        stop = {**_stop(label, table, proved, base.price), "proof": proof(plan)}
        start = next((at for at, other in enumerate(stops) if other["loss"] > stop["loss"]), len(stops))
        stops.insert(start, stop)
    heads = len(table.units) // len(set(table.launches.layer.tolist()))
    each = table.prices + table.launches.constant.sum(axis=0) / heads
    risks = table.risks.max(axis=0)
    return {
        "title": f"What a budget buys: {name or name_of(plan)}",
        "headline": headline(plan, buys),
        "about": [*details(plan), *notes(plan)],
        "rows": list(dict.fromkeys(layer for layer, _ in table.units)),
        "width": heads,
        "choices": list(table.choices),
        "meanings": legend_of_labels(),
        "stops": stops,
        "start": start,
        "offers": {"risk": _short(risks), "time": _short(each / each[:, :1])},
        "compared": False,
    }


def _short(values: Array) -> list[list[float | None]]:
    return [[rounded(v) if math.isfinite(v) else None for v in row] for row in values.tolist()]


def _picks(table: SolverTable, plan: Plan) -> NDArray[np.int64]:
    """Column indices of a plan's choices in the table.

    Raises:
        ValueError: The table lacks a choice or a head of the plan: they come from different calibrations.
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


def _stop(name: str, table: SolverTable, allocation: Allocation, base: float) -> dict[str, Any]:
    """One plan of the page's slider."""
    exact = np.zeros_like(allocation.picks)
    units = np.arange(len(exact))
    price, full = (shared_prices(picks, table.prices, table.launches) for picks in (allocation.picks, exact))
    return {
        "name": name,
        "picks": allocation.picks.tolist(),
        "risk": [rounded(v) for v in worst_length(table.risks, allocation.picks).tolist()],
        "time": [rounded(v) for v in (price / full).tolist()],
        "loss": rounded(float(allocation.risk.max())),
        "speed": rounded(base / allocation.price),
        "memory": None
        if table.kept is None
        else rounded(float(table.kept[units, allocation.picks].sum() / table.kept[:, 0].sum())),
        "proof": None,
    }
