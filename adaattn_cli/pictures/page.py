"""Plans on one HTML page that needs no network: one plan, or what every budget would buy."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaattn_hf.eval.pages import filled
from adaattn_hf.plans.choices import EXACT, Choice, Precision, Rank, Window
from adaattn_hf.plans.limits import unproven
from adaattn_hf.plans.plan import Plan
from adaattn_hf.plans.wording import allowed, legend, quotient
from adaattn_hf.policy.knapsack import SolverTable, evaluate, shared_prices, worst_length

from .headline import UNMEASURED, Speedups, details, grid, grounds, layers_of, name_of, notes, speed_of, verdict

BUDGETS = tuple(math.log1p(lead * 10.0**power) for power in range(-5, 0) for lead in (1, 1.5, 2, 3, 5, 7))
"""Budgets on the page's slider, nats/token: perplexity increases of 0.001 % to 70 %."""


def page(data: Mapping[str, Any]) -> str:
    """Returns the page.

    Args:
        data: `title`, the model's name; `under`, lines below the picture; `about`, lines that a click shows; `rows`,
            the layers; `width`, heads of a layer; `choices`, labels, exact first; `stops`, plans in the order of the
            slider, each with `name`, `verdict`, None where it was not verified, `loss` in nats/token, `speed`, perhaps
            `memory`, a share of the cache's bytes, and a `proof`, and per unit `picks`, `risk` in nats/token and `time`
            as a share of the exact one, None for what is not known; `start`, the stop that is shown first; `offers`,
            `risk` and `time` of every unit and choice, or None.
    """
    return filled("adaattn_cli.pictures", "plan.html", data)


def plan_page(plan: Plan, speedups: Speedups = UNMEASURED) -> str:
    """Returns the page of one plan, with what the report beside it says that it buys."""
    rows, choices = layers_of(plan), grid(plan)
    labels = list(dict.fromkeys((EXACT, *(choice for row in choices for choice in row))))
    width = max((len(row) for row in choices), default=1)
    risks = {(unit.layer, unit.head): unit.risk for unit in plan.units}
    shares = {(unit.layer, unit.head): quotient([unit.price], [unit.exact_price]) for unit in plan.units}
    units = [(layer, head) for layer in rows for head in range(width)]
    picks = [labels.index(row[at]) if at < len(row) else None for row in choices for at in range(width)]
    risk, time = [risks.get(unit, 0.0) for unit in units], [shares.get(unit, 1.0) for unit in units]
    speed = speed_of(plan) if plan.units else 1.0
    stop = _stop("the plan", picks, risk, time, plan.predicted_loss, speed)
    return page(
        {
            "title": name_of(plan),
            "under": [legend(labels), *notes(plan)],
            "about": details(plan),
            "rows": rows,
            "width": width,
            "choices": [choice.label for choice in labels],
            "stops": [{**stop, "verdict": verdict(plan, speedups), "proof": proof(plan)}],
            "start": 0,
            "offers": None,
        }
    )


def proof(plan: Plan) -> dict[str, Any] | None:
    """Returns the verdict of held-out text on a plan, nats/token, and in words."""
    if plan.verified is None or unproven(plan) is not None:
        return None
    sentence = f"Confidence of the bound: {grounds(plan)}."
    return {"mean": plan.verified.delta_nll, "upper": plan.verified.upper, "sentence": sentence}


def rounded(value: float | None) -> float | None:
    """Returns a number rounded to four digits, enough for a page; None for what no float can say."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")


def _stop(
    name: str,
    picks: Sequence[int | None],
    risk: Iterable[float],
    time: Iterable[float | None],
    loss: float,
    speed: float | None,
    memory: float | None = None,
) -> dict[str, Any]:
    return {
        "name": name, "picks": list(picks), "risk": list(map(rounded, risk)), "time": list(map(rounded, time)),
        "loss": rounded(loss), "speed": rounded(speed), "memory": rounded(memory), "verdict": None, "proof": None,
    }  # fmt: skip


def explorer(table: SolverTable, plan: Plan, speedups: Speedups = UNMEASURED, name: str = "") -> dict[str, Any]:
    """Returns the data of a calibration's page: the solver's plan at every budget, and the plan that was verified.

    The report beside it has its `speedups`; `name` is that of the model in the heading, the plan's own if absent.
    """
    exact = np.zeros(len(table.units), dtype=np.int64)
    base = evaluate(exact, table.prices, table.risks, table.launches).price
    full, units = shared_prices(exact, table.prices, table.launches), np.arange(len(exact))

    def solved(name: str, picks: NDArray[np.int64]) -> dict[str, Any]:
        allocation = evaluate(picks, table.prices, table.risks, table.launches)
        kept = table.kept
        memory = None if kept is None else float(kept[units, picks].sum() / kept[:, 0].sum())
        risk = worst_length(table.risks, picks).tolist()
        time = (shared_prices(picks, table.prices, table.launches) / full).tolist()
        return _stop(name, picks.tolist(), risk, time, float(allocation.risk.max()), base / allocation.price, memory)

    stops = [solved("exact", exact)]
    smallest = plan.protocol.get("settings", {}).get("aim") == "memory"
    for budget in BUDGETS:
        stop = solved(allowed(budget), table.solve(budget, smallest).picks)
        if stop["picks"] != stops[-1]["picks"]:
            stops.append({**stop, "budget": budget})
    start = len(stops) // 2
    if plan.verified is not None and not plan.is_exact:
        chosen = {(layer.layer, head): one.label for layer in plan.layers for head, one in enumerate(layer.choices)}
        strange = sorted({name for name in chosen.values() if name not in table.choices})
        if strange or not set(chosen) <= set(table.units):
            raise ValueError(
                f"plan: takes {', '.join(strange) or 'heads'} that its report does not hold; give the directory of one "
                "calibration"
            )
        picks = np.array([table.choices.index(chosen.get(unit, table.choices[0])) for unit in table.units])
        stop = solved(f"your plan, allowed {allowed(plan.budget)}", picks)
        stop |= {"verdict": verdict(plan, speedups), "proof": proof(plan)}
        start = next((at for at, other in enumerate(stops) if other["loss"] > stop["loss"]), len(stops))
        stops.insert(start, stop)
    heads = len(table.units) // len(set(table.launches.layer.tolist()))
    each = table.prices + table.launches.constant.sum(axis=0) / heads
    risks = table.risks.max(axis=0)
    parts = (Window(256, 16), Rank(16), *map(Precision, Precision.families))
    return {
        "title": name or name_of(plan),
        "under": [legend(map(Choice.of, parts)), *notes(plan)],
        "about": details(plan),
        "rows": list(dict.fromkeys(layer for layer, _ in table.units)),
        "width": heads,
        "choices": list(table.choices),
        "stops": stops,
        "start": start,
        "offers": {
            "risk": [list(map(rounded, row)) for row in risks.tolist()],
            "time": [list(map(rounded, row)) for row in (each / each[:, :1]).tolist()],
        },
    }
