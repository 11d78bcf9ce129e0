"""How the pages of docs/results write tables, losses and budgets."""

from __future__ import annotations

import math
from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a Markdown table, and an empty one."""
    return [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
    ]


def loss(value: float) -> str:
    """Returns a loss in nats/token as text."""
    return f"{value:.2e}"


def percent(budget: float) -> str:
    """Returns a budget as a rise of the perplexity."""
    return f"{100 * math.expm1(budget):.3g} %"
