"""A program: the operator calls that together answer one attention call.

A part is one rectangle of queries and keys, or a row of equal ones, that a fused kernel can compute. Parts are numbers
and small masks; they are made once per forward pass and shared by all layers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["EMPTY", "Part", "Program", "Run", "band_mask", "empty_rows", "may_be_empty"]

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
    p = torch.arange(first, first + q_len)[:, None]
    j = torch.arange(k_start, k_start + k_len)[None]
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
        torch.cat([torch.ones(q_len, sink_columns, dtype=torch.bool), keep], dim=1) if sink_columns else keep
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
