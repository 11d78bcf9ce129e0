"""Window and sinks of each key/value head, from the structure of a call and the rules of its heads."""

from __future__ import annotations

from ..attention.heads import HeadRules
from ..attention.structure import CallStructure

__all__ = ["ALL", "HeadWindows", "head_windows"]

ALL = 1 << 30
"""The window of a head that has none."""

HeadWindows = tuple[tuple[int, int], ...]
"""Window and sinks of each key/value head."""


def head_windows(structure: CallStructure, rules: HeadRules | None, kv_heads: int) -> HeadWindows | None:
    """Window and sinks of each key/value head, None where no head has a window."""
    if rules is None:
        if structure.window is None or not structure.windowed:
            return None
        return ((structure.window, structure.sinks),) * kv_heads
    found = [rules.window_in(structure, head) for head in range(kv_heads)]
    length = structure.kv_len
    # towards later keys no sink is exempt from a window that looks both ways
    if all(
        window is None or window + (sinks if structure.causal else 0) >= length for window, sinks in found
    ):
        return None
    return tuple((ALL, 0) if window is None else (window, sinks) for window, sinks in found)
