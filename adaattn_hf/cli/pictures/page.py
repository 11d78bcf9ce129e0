"""Shows plans on one HTML page without network access: an accessible grid of layers by heads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from adaattn_hf.eval.pages import filled

from ...plans.choices import EXACT, Choice
from ...plans.limits import unproven
from ...plans.plan import Plan
from ...plans.wording import legend
from .grid import details, grid, layers_of, notes, time_shares
from .headline import Bought, grounds, name_of, speed_of, verdict


def page(data: Mapping[str, Any]) -> str:
    """Returns the page.

    Args:
        data: `title`, the model's name; `headline`, the large line below it, or None for the verdict of the plan shown;
            `under`, lines below the picture; `about`, lines that a click shows; `rows`, the layers; `width`, heads of a
            layer; `choices`, labels, exact first; `stops`, plans in the order of the slider, each with `name`,
            `verdict`, None where it was not verified, `loss` in nats/token, `speed`, perhaps `memory`, a share of the
            cache's bytes, and a `proof`, and per unit `picks`, `risk` in nats/token and `time` as a share of the exact
            one, None for what is not known; `start`, the stop that is shown first; `offers`, `risk` and `time` of every
            unit and choice, or None; `compared`, whether the stops are shown beside one another.
    """
    return filled("adaattn_hf.cli.pictures", "page.html", data)


def plan_page(plan: Plan, buys: Bought | None = None) -> str:
    """Returns the page of one plan, with what the report beside it says that it buys."""
    return _pages([("the plan", buys, plan)], None, details(plan))


def compared(plans: Sequence[tuple[str, Bought | None, Plan]], line: str) -> str:
    """Returns a page with named plans beside one another; heads that differ are outlined."""
    return _pages(plans, line, ())


def proof(plan: Plan) -> dict[str, Any] | None:
    """Returns the verdict of held-out text on a plan, nats/token, and in words."""
    if plan.verified is None or unproven(plan) is not None:
        return None
    return {
        "mean": _finite(plan.verified.delta_nll),
        "upper": _finite(plan.verified.upper),
        "sentence": f"Confidence of the bound: {grounds(plan)}.",
    }


def rounded(value: float | None) -> float | None:
    """Returns a number rounded to four digits, enough for a page; None for what no float can say."""
    return None if value is None or _finite(value) is None else float(f"{value:.4g}")


def _finite(value: float) -> float | None:
    """JSON has neither infinity nor NaN."""
    return value if math.isfinite(value) else None


def _pages(plans: Sequence[tuple[str, Bought | None, Plan]], line: str | None, about: Sequence[str]) -> str:
    rows = sorted({index for *_, plan in plans for index in layers_of(plan)})
    heads = max(max((len(layer.choices) for layer in plan.layers), default=1) for *_, plan in plans)
    grids = [grid(plan, rows, heads) for *_, plan in plans]
    choices: dict[Choice, int] = {EXACT: 0}
    for choice in (choice for one in grids for row in one for choice in row):
        choices.setdefault(choice, len(choices))
    width = max((len(row) for one in grids for row in one), default=1)
    stops = []
    for (name, buys, plan), shown in zip(plans, grids, strict=True):
        risks = {(unit.layer, unit.head): unit.risk for unit in plan.units}
        stops.append(
            {
                "name": name,
                "verdict": verdict(plan, buys),
                "picks": [choices[row[head]] if head < len(row) else None for row in shown for head in range(width)],
                "risk": [rounded(risks.get((layer, head), 0.0)) for layer in rows for head in range(width)],
                "time": list(map(rounded, time_shares(plan, rows, width))),
                "loss": rounded(plan.predicted_loss),
                "speed": rounded(speed_of(plan)) if plan.units else 1.0,
                "proof": proof(plan),
            }
        )
    return page(
        {
            "title": name_of(plans[0][-1]),
            "headline": line,
            "under": [legend(choices), *dict.fromkeys(note for *_, plan in plans for note in notes(plan))],
            "about": about,
            "rows": rows,
            "width": width,
            "choices": [choice.label for choice in choices],
            "stops": stops,
            "start": 0,
            "offers": None,
            "compared": len(plans) > 1,
        }
    )
