"""How many pairs of queries and keys a plan of windows reads: what attention can gain by it, whatever the kernel."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from adaattn_hf.attention.heads import ALL

_WINDOW = re.compile(r"w(\d+)\+(\d+)")
_ALL = ("exact", "bf16", "int8")
"""Labels of parts that change no pair."""


def fewer_pairs(picks: Sequence[str], length: int) -> float | None:
    """Returns how many times fewer pairs than causal attention a plan reads; None where that depends on the data.

    Args:
        picks: Label of each unit's choice.
        length: Tokens of the prefill.
    """
    every, read = length * (length + 1) // 2, 0
    for label in picks:
        found = window_of(label)
        if found is None:
            return None
        window, sinks = found
        hidden = max(length - window, 0)  # keys before the last row's window
        sinks = min(sinks, hidden)
        read += every - hidden * (hidden + 1) // 2 + sinks * hidden - sinks * (sinks - 1) // 2
    return every * len(picks) / read


def window_of(label: str) -> tuple[int, int] | None:
    """Window and sinks of a choice, `ALL` and none where it is exact; None where what it reads depends on the data."""
    window, sinks = ALL, 0
    for part in set(label.split()).difference(_ALL):
        found = _WINDOW.fullmatch(part)
        if found is None:
            return None
        window, sinks = map(int, found.groups())
    return window, sinks


def lines_of(records: Sequence[Mapping[str, Any]], words: str) -> list[str]:
    """A line on the plans of a budget, at their longest length; none where some plan's pairs are not known.

    Args:
        records: Seeds that met the budget.
        words: The budget.
    """
    found = [fewer_pairs(record["picks"], max(map(int, record["ratio"]))) for record in records]
    known = [times for times in found if times is not None]
    if not known or len(known) < len(found):
        return []
    return [
        f"* {words}: plans read {statistics.median(known):.2f} times fewer pairs than exact attention "
        f"({min(known):.2f} to {max(known):.2f}), which bounds what equally fast kernels gain"
    ]
