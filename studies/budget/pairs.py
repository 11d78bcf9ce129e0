"""How many pairs of queries and keys a plan of windows reads: what attention can gain by it, whatever the kernel."""

from __future__ import annotations

import re
from collections.abc import Sequence

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
