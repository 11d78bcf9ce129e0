"""Prints a plan: its picture, what its labels mean, and what it costs and buys in one line."""

from __future__ import annotations

from rich.console import Console

from adaattn_hf.eval.progress import tell

from ..plans.plan import Plan
from .pictures.grid import below, details, heading, heat_map
from .pictures.headline import Bought, headline


def print_plan(console: Console, plan: Plan, buys: Bought, verbose: bool, instead: str | None = None) -> None:
    """Prints a plan.

    Args:
        console: Where it goes.
        plan: The plan.
        buys: What the report beside it says that it buys.
        verbose: Whether nats, levels and versions are printed, too.
        instead: What is said in place of the headline, where no plan passed.
    """
    tell(console, heading(plan))
    if not plan.is_exact:
        console.print(heat_map(plan))
    for line in (*below(plan), instead or headline(plan, buys), *(details(plan) if verbose else ())):
        tell(console, line)
