"""Programs of kernel calls: how runs of queries and keys, or bands of a dense mask, become the parts of one.

A part is one rectangle of queries and keys, or a row of equal ones, that a fused kernel can compute. Parts are numbers
and small masks; they are made once per forward pass and shared by all layers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...attention.structure import CallStructure
from ...attention.tap import transient
from . import limits

EMPTY = -1e30
"""Log-sum-exp of a row that has seen no key: finite, so that merging two such rows is no NaN."""


class Part(NamedTuple):
    """One kernel call.

    Attributes:
        row, rows: Batch rows.
        q_start, q_len, k_start, k_len: Queries and keys.
        causal: Local query `i` sees local keys up to `i`.
        count: The part is repeated so many times, each `q_len` further in queries and keys.
        merge: The queries already hold a partial result.
        sinks: So many keys from `sink_start` on stand in front of the part's own keys.
        mask: Additive, broadcastable to `[rows, heads, q_len, sinks + k_len]`.
        empty: `[rows or 1, heads or 1, q_len]`, True where the mask hides every key; None where no row is such.
    """

    row: int
    rows: int
    q_start: int
    q_len: int
    k_start: int
    k_len: int
    causal: bool = False
    count: int = 1  # type: ignore[assignment]  # hides tuple.count, which nobody needs
    merge: bool = False
    sinks: int = 0
    sink_start: int = 0
    mask: Tensor | None = None
    empty: Tensor | None = None


def bias_of(bias: Tensor, part: Part) -> Tensor:
    """What a part reads of a bias, or adds to its gradient; dimensions of 1 hold for all parts."""
    rows = bias if bias.shape[0] == 1 else bias[part.row : part.row + part.rows]
    rows = rows if bias.shape[2] == 1 else rows[:, :, part.q_start : part.q_start + part.q_len]
    return rows if bias.shape[3] == 1 else rows[..., part.k_start : part.k_start + part.k_len]


class Program(NamedTuple):
    """Parts in the order in which they must run.

    Attributes:
        parts: The calls.
        covered: Every query belongs to a part that does not merge; otherwise the output starts as zeros.
        merges: Some part merges, so that every part must return its log-sum-exp.
        dense: Masks are made while running, from the structure; keeping them would cost too much memory.
    """

    parts: tuple[Part, ...]
    covered: bool
    merges: bool
    dense: bool = False


class Run(NamedTuple):
    """Queries and keys of one sequence; local query `i` stands at local key index `i + offset`."""

    q_len: int
    k_len: int
    offset: int


def band_mask(
    first: int,
    q_len: int,
    k_start: int,
    k_len: int,
    *,
    causal: bool,
    window: int | None,
    sinks: int = 0,
    sink_columns: int = 0,
) -> Tensor | None:
    """Boolean `[q_len, sink_columns + k_len]` of a band whose first query stands at key index `first`.

    None where every key is visible. `sink_columns` are columns in front that every query sees.
    """
    last, k_last = first + q_len - 1, k_start + k_len - 1
    near = window is None or k_last < sinks
    if window is not None and not near:
        near = k_start > last - window if causal else max(last - k_start, k_last - first) < window
    if near and (not causal or k_last <= first):
        return None
    p = torch.arange(first, first + q_len, device="cpu")[:, None]
    j = torch.arange(k_start, k_start + k_len, device="cpu")[None]
    keep: Tensor | None = None
    if window is not None:
        keep = (j > p - window) if causal else ((p - j).abs() < window)
        if sinks:
            keep = keep | (j < sinks)
    if causal:
        keep = (j <= p) if keep is None else keep & (j <= p)
    if keep is None:
        return None
    return (
        torch.cat([torch.ones(q_len, sink_columns, dtype=torch.bool, device="cpu"), keep], dim=1)
        if sink_columns
        else keep
    )


def may_be_empty(
    first: int, q_len: int, k_start: int, k_len: int, *, causal: bool, window: int | None
) -> bool:
    """Whether some row of a band might see none of its keys; told from the numbers alone."""
    last, k_last = first + q_len - 1, k_start + k_len - 1
    if causal and first < k_start:
        return True
    if window is None:
        return False
    return last - window + 1 > k_last or (not causal and first + window - 1 < k_start)


def empty_rows(mask: Tensor) -> Tensor:
    """`[…, q_len]`, True where an additive mask hides every key."""
    return mask.amax(dim=-1) == float("-inf")


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
    for a in range(start, stop, rules.step):
        b = min(a + rules.step, stop)
        high = run.k_len
        if rules.causal:
            high = min(high, b + run.offset)
        elif rules.window is not None:
            high = min(high, max(b - 1 + run.offset + rules.window, rules.sinks))
        if high > 0:
            yield Local(a, b - a, 0, high, band=True)


def dense_program(
    structure: CallStructure, device: torch.device, dtype: torch.dtype, step: int, lse: bool = True
) -> Program:
    """Bands of `step` rows against the keys that any of their queries sees.

    Without `lse` it is not told which rows a small mask leaves empty.
    """
    heads = 1 if structure.mask is None else structure.mask.shape[1]
    pairs = structure.batch * heads * structure.q_len * structure.kv_len
    keep = pairs * dtype.itemsize <= limits.KEPT_BYTES
    if pairs <= limits.SMALL_PAIRS and step >= structure.q_len:
        # looking for what to leave out would cost more than computing it
        whole = Part(0, structure.batch, 0, structure.q_len, 0, structure.kv_len)
        mask = additive(structure.visible(device=device), dtype)
        return Program(
            (whole._replace(mask=mask, empty=empty_rows(mask) if lse else None),), True, merges=False
        )
    parts = []
    covered = True
    for start in range(0, structure.q_len, step):
        stop = min(start + step, structure.q_len)
        visible = structure.visible(start, stop, device=device)
        seen = visible.flatten(0, 2).any(dim=0).nonzero()
        if len(seen) == 0:
            covered = False
            continue
        low, high = int(seen[0]), int(seen[-1]) + 1
        part = Part(0, structure.batch, start, stop - start, low, high - low)
        parts.append(_with_mask(part, visible, dtype) if keep else part)
    return Program(tuple(parts), covered, merges=False, dense=not keep)


def constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number as a tensor that is made once."""
    return (_number if transient() else _kept_number)(value, dtype, device)


def _number(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=dtype, device=device)


_kept_number = functools.cache(_number)


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask as numbers to add: 0 where a key is visible, -inf where it is not."""
    zero, hidden = (constant(value, dtype, visible.device) for value in (0.0, float("-inf")))
    return torch.where(visible, zero, hidden)


def dense_part(part: Part, structure: CallStructure, device: torch.device, dtype: torch.dtype) -> Part:
    """A part with its mask, made now."""
    return _with_mask(part, structure.visible(part.q_start, part.q_start + part.q_len, device=device), dtype)


def _with_mask(part: Part, visible: Tensor, dtype: torch.dtype) -> Part:
    shown = visible[..., part.k_start : part.k_start + part.k_len]
    if bool(shown.all()):
        return part
    mask = torch.zeros(shown.shape, dtype=dtype, device=shown.device).masked_fill_(~shown, float("-inf"))
    empty = empty_rows(mask)
    return part._replace(mask=mask, empty=empty if bool(empty.any()) else None)
