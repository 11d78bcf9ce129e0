"""Shows plans on one HTML page without network access: an accessible grid of layers by heads."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from .choices import EXACT, Choice
from .plan import Plan
from .render import grid, printable, summary


def page(data: Mapping[str, Any]) -> str:
    """Returns the page.

    Args:
        data: `title`; `about`, lines below it; `rows`, the layers; `width`, heads of a layer; `choices`, labels,
            exact first; `stops`, plans in the order of the slider, each with `name`, `loss` in nats/token, `speed`,
            perhaps `memory`, a share of the cache's bytes, and a `proof`, and per unit `picks`, `risk` in nats/token
            and `time` as a share of the exact one; `start`, the stop that is shown first; `offers`, `risk` and `time`
            of every unit and choice, or None; `compared`, whether stops are plans to be compared.
    """
    template = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    # within a script element nothing but these characters could end the data
    text = text.replace("<", "\\u003c").replace("\u2028", "\\u2028")
    return template.replace("/*TITLE*/", html.escape(printable(data["title"]))).replace("/*DATA*/", text)


def plan_page(plan: Plan) -> str:
    """Returns the page of one plan."""
    return _pages([("the plan", plan)], f"Plan for {plan.model_type}", summary(plan), together=False)


def compared(plans: Sequence[tuple[str, Plan]], about: Sequence[str]) -> str:
    """Returns a page on which named plans can be compared; heads that differ are marked."""
    return _pages(plans, f"Plans for {plans[0][1].model_type}", about, together=True)


def proof(plan: Plan) -> dict[str, Any] | None:
    """Returns the verdict of held-out text on a plan, nats/token."""
    if plan.verified is None:
        return None
    return {
        "mean": plan.verified.delta_nll,
        "upper": plan.verified.upper,
        "sentence": plan.verified.sentence,
    }


def rounded(value: float) -> float:
    """Returns a number rounded to four digits, enough for a page."""
    return float(f"{value:.4g}")


def _pages(plans: Sequence[tuple[str, Plan]], title: str, about: Sequence[str], *, together: bool) -> str:
    layers = max(max((layer.layer for layer in plan.layers), default=-1) for _, plan in plans) + 1
    heads = max(max((len(layer.choices) for layer in plan.layers), default=1) for _, plan in plans)
    grids = [grid(plan, layers, heads) for _, plan in plans]
    choices: dict[Choice, int] = {EXACT: 0}
    for choice in (choice for one in grids for row in one for choice in row):
        choices.setdefault(choice, len(choices))
    width = max((len(row) for one in grids for row in one), default=1)
    stops = [_stop(name, plan, one, choices, width) for (name, plan), one in zip(plans, grids, strict=True)]
    return page(
        {
            "title": title,
            "about": list(about),
            "rows": list(range(len(grids[0]))),
            "width": width,
            "choices": [choice.label for choice in choices],
            "stops": stops,
            "start": 0,
            "offers": None,
            "compared": together,
        }
    )


def _stop(
    name: str, plan: Plan, rows: list[list[Choice]], choices: Mapping[Choice, int], width: int
) -> dict[str, Any]:
    """Returns one plan for the page; layers that it does not contain are exact."""
    known = {(unit.layer, unit.head): unit for unit in plan.units}
    units = [(layer, head) for layer in range(len(rows)) for head in range(width)]
    risk = [known[unit].risk if unit in known else 0.0 for unit in units]
    time = [
        known[unit].price / known[unit].exact_price if unit in known and known[unit].exact_price else 1.0
        for unit in units
    ]
    exact, price = sum(u.exact_price for u in plan.units), sum(u.price for u in plan.units)
    return {
        "name": name,
        "picks": [choices[rows[layer][head]] if head < len(rows[layer]) else 0 for layer, head in units],
        "risk": [rounded(value) for value in risk],
        "time": [rounded(value) for value in time],
        "loss": rounded(plan.predicted_loss),
        "speed": rounded(exact / price) if price > 0.0 else 1.0,
        "proof": proof(plan),
    }
