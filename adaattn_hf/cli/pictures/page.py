"""Shows plans on one HTML page without network access: an accessible grid of layers by heads."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from adaattn_hf.eval.pages import filled

from ..._files import printable
from ...plans.choices import EXACT, Choice
from ...plans.plan import Plan
from ...plans.wording import legend, quotient
from .grid import details, grid, layers_of, notes
from .headline import Bought, cost, headline, name_of, speed_of


def page(data: Mapping[str, Any]) -> str:
    """Returns the page.

    Args:
        data: `title`; `headline`, one line below it; `about`, lines that a click shows; `rows`, the layers; `width`,
            heads of a layer; `choices`, labels, exact first, and `meanings`, a line on them; `stops`, plans in the
            order of the slider, each with `name`, `loss` in nats/token, `speed`, perhaps `memory`, a share of the
            cache's bytes, and a `proof`, and per unit `picks`, `risk` in nats/token and `time` as a share of the exact
            one, None for what is not known; `start`, the stop that is shown first; `offers`, `risk` and `time` of every
            unit and choice, or None; `compared`, whether stops are plans to be compared.
    """
    text = filled("adaattn_hf.cli.pictures", "page.html", data)
    return text.replace("/*TITLE*/", html.escape(printable(data["title"])), 1)


def plan_page(plan: Plan, buys: Bought | None = None) -> str:
    """Returns the page of one plan.

    Args:
        plan: The plan.
        buys: What the report beside it says that it buys.
    """
    return _pages(
        [("the plan", plan)], f"Plan for {name_of(plan)}", headline(plan, buys), details(plan), together=False
    )


def compared(plans: Sequence[tuple[str, Plan]], line: str) -> str:
    """Returns a page on which named plans can be compared; heads that differ are marked."""
    return _pages(plans, f"Plans for {name_of(plans[0][1])}", line, (), together=True)


def proof(plan: Plan) -> dict[str, Any] | None:
    """Returns the verdict of held-out text on a plan, nats/token, and in words."""
    if plan.verified is None:
        return None
    return {
        "mean": _finite(plan.verified.delta_nll),
        "upper": _finite(plan.verified.upper),
        "sentence": cost(plan),
    }


def rounded(value: float | None) -> float | None:
    """Returns a number rounded to four digits, enough for a page; None for what no float can say."""
    return None if value is None or _finite(value) is None else float(f"{value:.4g}")


def _finite(value: float) -> float | None:
    """JSON has neither infinity nor NaN."""
    return value if math.isfinite(value) else None


def _pages(plans: Sequence[tuple[str, Plan]], title: str, line: str, about: Sequence[str], *, together: bool) -> str:
    rows = sorted({index for _, plan in plans for index in layers_of(plan)})
    heads = max(max((len(layer.choices) for layer in plan.layers), default=1) for _, plan in plans)
    grids = [grid(plan, rows, heads) for _, plan in plans]
    choices: dict[Choice, int] = {EXACT: 0}
    for choice in (choice for one in grids for row in one for choice in row):
        choices.setdefault(choice, len(choices))
    width = max((len(row) for one in grids for row in one), default=1)
    stops = [_stop(name, plan, rows, one, choices, width) for (name, plan), one in zip(plans, grids, strict=True)]
    return page(
        {
            "title": title,
            "headline": printable(line),
            "about": [*about, *dict.fromkeys(note for _, plan in plans for note in notes(plan))],
            "rows": rows,
            "width": width,
            "choices": [choice.label for choice in choices],
            "meanings": legend(choices),
            "stops": stops,
            "start": 0,
            "offers": None,
            "compared": together,
        }
    )


def _stop(
    name: str,
    plan: Plan,
    rows: Sequence[int],
    shown: list[list[Choice]],
    choices: Mapping[Choice, int],
    width: int,
) -> dict[str, Any]:
    """Returns one plan for the page; layers that it does not contain are exact."""
    known = {(unit.layer, unit.head): unit for unit in plan.units}
    units = [(layer, head) for layer in rows for head in range(width)]
    of_unit = [known.get(unit) for unit in units]
    return {
        "name": name,
        "picks": [choices[row[head]] if head < len(row) else 0 for row in shown for head in range(width)],
        "risk": [0.0 if unit is None else rounded(unit.risk) for unit in of_unit],
        "time": [1.0 if unit is None else rounded(quotient([unit.price], [unit.exact_price])) for unit in of_unit],
        "loss": rounded(plan.predicted_loss),
        "speed": rounded(speed_of(plan)) if plan.units else 1.0,
        "proof": proof(plan),
    }
