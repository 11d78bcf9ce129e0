"""How pages write tables, losses and budgets, and names that may hold markup."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}
_MARKUP = {ord(character): f"&#{ord(character)};" for character in "|<["}


def plain(text: str) -> str:
    """A name as a terminal may show it: control characters, escape sequences among them, are spelt out."""
    return text.translate(_CONTROL)


def harmless(record: Any) -> Any:
    """A record whose texts, keys too, bring no tag, link or table cell of their own to a page, and stay on one line."""
    if isinstance(record, str):
        return plain(record).translate(_MARKUP)
    if isinstance(record, Mapping):
        return {harmless(key): harmless(value) for key, value in record.items()}
    return [harmless(value) for value in record] if isinstance(record, (list, tuple)) else record


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
