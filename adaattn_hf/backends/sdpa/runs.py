"""From one run of queries and keys to parts: full, causal, causal with an offset, windows with sinks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from . import limits
from .parts import Part, Run

__all__ = ["Local", "Rules", "banded", "local_parts"]


class Rules(NamedTuple):
    """What decides visibility inside a run, and what the kernel can do about it.

    Attributes:
        causal, window, sinks: As in `CallStructure`.
        merges: Partial results can be merged by their log-sum-exp.
        flag: The kernel knows causality by itself; otherwise a mask says it.
        step: Rows of a band.
    """

    causal: bool
    window: int | None
    sinks: int
    merges: bool
    flag: bool
    step: int


class Local(NamedTuple):
    """A part in a run's own coordinates; `band` asks for the mask of its rows."""

    q_start: int
    q_len: int
    k_start: int
    k_len: int
    causal: bool = False
    count: int = 1  # type: ignore[assignment]  # hides tuple.count, which nobody needs
    merge: bool = False
    sinks: int = 0
    band: bool = False

    def placed(self, row: int, rows: int, q_start: int, k_start: int) -> Part:
        """The part in the coordinates of the call, without its mask."""
        return Part(
            row, rows, q_start + self.q_start, self.q_len, k_start + self.k_start, self.k_len,
            self.causal, self.count, self.merge, self.sinks, k_start,
        )  # fmt: skip


def local_parts(run: Run, rules: Rules) -> Iterator[Local]:
    """The cheapest exact parts of a run."""
    window = rules.window
    if run.q_len == 0:
        return
    if window is not None and (
        window + rules.sinks < run.offset + run.q_len
        or (not rules.causal and window < run.k_len - run.offset)
    ):
        yield from _windowed(run, rules, window)
    elif rules.causal:
        yield from _causal(run, rules)
    elif rules.flag or run.q_len <= rules.step:
        yield Local(0, run.q_len, 0, run.k_len)
    else:
        for start in range(0, run.q_len, rules.step):
            yield Local(start, min(rules.step, run.q_len - start), 0, run.k_len)


def _causal(run: Run, rules: Rules) -> Iterator[Local]:
    q_len, k_len, offset = run
    k_len = min(k_len, q_len + offset)
    if offset >= k_len - 1 and (rules.flag or q_len <= rules.step):
        yield Local(0, q_len, 0, k_len)
    elif offset == 0 and rules.flag:
        yield Local(0, q_len, 0, k_len, causal=True)
    elif rules.flag and rules.merges and q_len > limits.FEW_ROWS:
        yield Local(0, q_len, 0, offset)
        yield Local(0, q_len, offset, k_len - offset, causal=True, merge=True)
    else:
        yield from banded(run, rules, 0, q_len)


def _windowed(run: Run, rules: Rules, window: int) -> Iterator[Local]:
    """Rows near the start without a left border, then equal bands; sinks are merged, or stand in front of each band."""
    q_len, k_len, offset = run
    sinks = min(rules.sinks, k_len)
    border = min(max(window + sinks - offset, 0), q_len)
    start = 0
    if rules.causal and rules.flag:
        start = min(max(window - offset, 0), q_len)
        if start:
            yield from _causal(Run(start, k_len, offset), rules)
    if start < border:
        yield from banded(run, rules, start, border)
    if border == q_len:
        return
    behind = 1 if rules.causal else window
    own = 0 if rules.merges else sinks
    ahead = rules.step + window - 1 + (behind - 1)
    bands = (q_len - border) // rules.step
    # bands whose keys are not cut short by the end of the run are all alike
    alike = max(0, min(bands, (k_len - (border + offset) - behind + 1) // rules.step))
    if alike:
        yield Local(
            border, rules.step, border + offset - window + 1, ahead, count=alike, sinks=own, band=True
        )
    for a in range(border + alike * rules.step, q_len, rules.step):
        b = min(a + rules.step, q_len)
        low, high = a + offset - window + 1, min(k_len, b - 1 + offset + behind)
        if high > low:
            yield Local(a, b - a, low, high - low, sinks=own, band=True)
        elif own:
            yield Local(a, b - a, 0, own)
    if sinks and rules.merges:
        yield Local(border, q_len - border, 0, sinks, merge=True)


def banded(run: Run, rules: Rules, start: int, stop: int) -> Iterator[Local]:
    """Bands of rows against all keys that any of them sees; used where the window's left border is not reached yet."""
    near = rules.window is not None and not rules.causal
    for a in range(start, stop, rules.step):
        b = min(a + rules.step, stop)
        high = run.k_len
        if rules.causal:
            high = min(high, b + run.offset)
        elif near and rules.window is not None:
            high = min(high, max(b - 1 + run.offset + rules.window, rules.sinks))
        if high > 0:
            yield Local(a, b - a, 0, high, band=True)
