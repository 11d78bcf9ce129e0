"""Draws what other budgets would buy: the solver's plans from the table that is kept with a plan, on one page."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...plans.choices import Choice, Precision, Rank, Window
from ...plans.plan import Plan
from ...plans.wording import allowed, legend
from ...policy.knapsack import Allocation, Array, evaluate, shared_prices, worst_length
from ...policy.table import SolverTable
from .grid import details, notes
from .headline import Bought, name_of, verdict
from .page import proof, rounded

BUDGETS = tuple(math.log1p(lead * 10.0**power) for power in range(-5, 0) for lead in (1, 1.5, 2, 3, 5, 7))
"""Budgets on the page's slider, nats/token: perplexity increases of 0.001 % to 70 %."""


def explorer(table: SolverTable, plan: Plan, buys: Bought | None = None, name: str | None = None) -> dict[str, Any]:
    """Returns the data of a calibration's page: the solver's plan at every budget, and the plan that was verified.

    The report beside it says what it `buys`; `name` is that of the model in the heading, the plan's own if absent.
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
        chosen = evaluate(_picks(table, plan), table.prices, table.risks, table.launches)
        stop = _stop(f"your plan, allowed {allowed(plan.budget)}", table, chosen, base.price)
        stop |= {"verdict": verdict(plan, buys), "proof": proof(plan)}
        start = next((at for at, other in enumerate(stops) if other["loss"] > stop["loss"]), len(stops))
        stops.insert(start, stop)
    heads = len(table.units) // len(set(table.launches.layer.tolist()))
    each = table.prices + table.launches.constant.sum(axis=0) / heads
    risks = table.risks.max(axis=0)
    parts = (Window(256, 16), Rank(16), *map(Precision, Precision.families))
    return {
        "title": name or name_of(plan),
        "headline": None,
        "under": [legend(map(Choice.of, parts)), *notes(plan)],
        "about": details(plan),
        "rows": list(dict.fromkeys(layer for layer, _ in table.units)),
        "width": heads,
        "choices": list(table.choices),
        "stops": stops,
        "start": start,
        "offers": {"risk": _short(risks), "time": _short(each / each[:, :1])},
        "compared": False,
    }


def _short(values: Array) -> list[list[float | None]]:
    return [list(map(rounded, row)) for row in values.tolist()]


def _picks(table: SolverTable, plan: Plan) -> NDArray[np.int64]:
    chosen = {(layer.layer, head): choice.label for layer in plan.layers for head, choice in enumerate(layer.choices)}
    strange = sorted({name for name in chosen.values() if name not in table.choices})
    if strange or not set(chosen) <= set(table.units):
        raise ValueError(
            f"plan: takes {', '.join(strange) or 'heads'} that its report does not hold; give the directory of one "
            "calibration"
        )
    return np.array([table.choices.index(chosen.get(unit, table.choices[0])) for unit in table.units])


def _stop(name: str, table: SolverTable, allocation: Allocation, base: float) -> dict[str, Any]:
    exact = np.zeros_like(allocation.picks)
    units = np.arange(len(exact))
    price, full = (shared_prices(picks, table.prices, table.launches) for picks in (allocation.picks, exact))
    return {
        "name": name,
        "verdict": None,
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
