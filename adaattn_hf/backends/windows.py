"""Window and sinks of each key/value head, from the structure of a call and the rules of its heads."""

from __future__ import annotations

from ..attention.heads import HeadRules
from ..attention.structure import CallStructure

ALL = 1 << 30
"""The window of a head that has none, and the most that tables of int32 are told of: no call has as many keys."""

HeadWindows = tuple[tuple[int, int], ...]
"""Window and sinks of each key/value head."""


def head_windows(structure: CallStructure, rules: HeadRules | None, kv_heads: int) -> HeadWindows | None:
    """Window and sinks of each key/value head, None where no head has a window."""
    if rules is None:
        if structure.window is None or not structure.windowed:
            return None
        return ((structure.window, min(structure.sinks, ALL)),) * kv_heads
    # all steps of a generation ask, and only the length of their keys differs
    memo = rules.__dict__.setdefault("_windows_in", {})
    own = (structure.window, structure.sinks, structure.causal, kv_heads)
    if own not in memo:
        memo[own] = windows_and_reach(structure, rules, kv_heads)
    windows, reach = memo[own]
    return windows if reach < structure.kv_len else None


def windows_and_reach(structure: CallStructure, rules: HeadRules, kv_heads: int) -> tuple[HeadWindows, int]:
    """Window and sinks of each key/value head, and how many keys the narrowest leaves; ALL without a window."""
    found = [rules.window_in(structure, head) for head in range(kv_heads)]
    # towards later keys no sink is exempt from a window that looks both ways
    reaches = [w + (sinks if structure.causal else 0) for w, sinks in found if w is not None]
    narrow = tuple((ALL, 0) if w is None else (min(w, ALL), min(s, ALL)) for w, s in found)
    return narrow, min(reaches, default=ALL)
