"""Work tables of the launches: segments, windows per head and work items, as small tensors on the device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...attention.structure import CallStructure, Segment
from ..capability import GRID
from ..remembered import Remembered
from ..windows import ALL, HeadWindows

_made = Remembered(256)
"""Tables of the last few kinds of calls, so that calls of one shape make theirs once."""


MOST_ENTRIES = GRID // 4 * 4
"""Entries of one launch; those of the next one begin at a multiple of 16 bytes, too."""


class Work(NamedTuple):
    """Tables of a launch.

    Attributes:
        segments: int32 `[segments, 6]`.
        entries: int32 `[entries, 3]`: segment, first row, key/value head; those with most to do come first; or
            the items of `dealt`.
        rules: int32 `[kv_heads, 2]`, window and sinks; the entries where no head has a window.
        ends: Whether every segment's keys end with one of their tiles or with the tensor.
        read: What all entries read, in keys for blocks of queries and in queries for blocks of keys.
    """

    segments: Tensor
    entries: Tensor
    rules: Tensor
    ends: bool
    read: int

    def launches(self) -> tuple[Tensor, ...]:
        """The entries of each launch: of more than one for very many documents alone."""
        return (self.entries,) if len(self.entries) <= MOST_ENTRIES else self.entries.split(MOST_ENTRIES)


def work_of(
    of: Literal["queries", "keys"],
    structure: CallStructure,
    segments: Sequence[Segment],
    windows: HeadWindows | None,
    kv_heads: int,
    blocks: tuple[int, int],
    device: torch.device,
    silent: bool = False,
    parts: int = 0,
    programs: int = 0,
) -> Work:
    """Blocks of queries, by the number of keys that they read, or of keys, by the number of queries that read them.

    Args:
        of: What the blocks are of.
        structure: The call's.
        segments: Its runs.
        windows: Of `head_windows`.
        kv_heads: Key/value heads.
        blocks: Queries and keys per tile.
        device: Where the tables go.
        silent: Blocks of queries outside of all segments come last, as segments without keys.
        parts: Items that an entry is told as, by `dealt`; 0 for none.
        programs: That compute the items in turn; 0 for one each.
    """
    key = ("triton", of, windows, kv_heads, blocks, device, silent, parts, programs)

    def find() -> Work:
        runs = (*segments, *(_silent(structure, segments) if silent else ()))

        def make() -> Work:
            entries, costs = _entries(of == "queries", structure.causal, runs, windows, kv_heads, blocks)
            read = int(costs.sum())
            if parts:
                entries = dealt(entries, costs + _BESIDE_TILES * blocks[1], parts, programs)
            ends = all(s.k_len % blocks[1] == 0 or s.k_start + s.k_len == structure.kv_len for s in runs)
            table = np.array(runs, dtype=np.int32).reshape(-1, 6)
            return _placed(table, entries, read, windows, ends, device)

        return _made.get((key, structure.causal, structure.kv_len, runs), make)

    return structure.cached(key, find)


def _silent(structure: CallStructure, segments: Sequence[Segment]) -> list[Segment]:
    """The runs of queries between segments and around them: they see no key, and stand before the first."""
    found, n = [], structure.q_len
    taken: list[list[tuple[int, int]]] = [[] for _ in range(structure.batch)]
    for s in segments:
        taken[s.row].append((s.q_start, s.q_start + s.q_len))
    for row, runs in enumerate(taken):
        for (_, stop), (start, _) in itertools.pairwise([(0, 0), *sorted(runs), (n, n)]):
            if start > stop:
                found.append(Segment(row, stop, start - stop, 0, 0, stop - start))
    return found


def _placed(
    segments: NDArray[np.int32],
    entries: NDArray[np.int32],
    read: int,
    windows: HeadWindows | None,
    ends: bool,
    device: torch.device,
) -> Work:
    """The tables in one copy to the device."""
    rules = np.array(windows or (), dtype=np.int32).ravel()
    parts = [segments.ravel(), entries.ravel(), rules]
    table = torch.from_numpy(np.concatenate(parts)).to(device, non_blocking=True)
    a, b, c = table.split([len(part) for part in parts])
    return Work(a.view(-1, 6), b.view(-1, 3), c.view(-1, 2) if windows else b, ends, read)


def _tiles(lengths: NDArray[np.int64], block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Segment and first row of every tile."""
    counts = -(-lengths // block)
    segment = np.repeat(np.arange(len(lengths)), counts)
    before = np.repeat(counts.cumsum() - counts, counts)
    return segment, (np.arange(len(segment)) - before) * block


def _entries(
    queries: bool,
    causal: bool,
    segments: Sequence[Segment],
    windows: HeadWindows | None,
    kv_heads: int,
    blocks: tuple[int, int],
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """The entries of blocks of queries or of keys, and what each of them reads."""
    table = np.array(segments, dtype=np.int64).reshape(-1, 6)
    block = blocks[0] if queries else blocks[1]
    segment, first = _tiles(table[:, 2 if queries else 4], block)
    _, _, q_len, _, k_len, offset = table[segment].T
    last = np.minimum(first + block, q_len if queries else k_len) - 1
    costs = []
    for window, sinks in windows or ((ALL, 0),) * kv_heads:
        if queries:
            start = np.maximum(first + offset - window + 1, 0) // blocks[1] * blocks[1]
            stop = np.minimum(k_len, last + offset + (1 if causal else window))
            costs.append(np.maximum(stop - start, 0) + np.minimum(sinks, start))
        else:
            start = np.maximum(first - offset - (0 if causal else window - 1), 0)
            stop = np.where(first < sinks, q_len, np.minimum(q_len, last + window - offset))
            costs.append(np.maximum(stop - start, 0))
    return _longest_first(segment, first, costs)


_RANKS = 16
"""Classes of cost, from none to the largest, within which entries are ordered by head."""


def _longest_first(
    segment: NDArray[np.int64], first: NDArray[np.int64], costs: list[NDArray[np.int64]]
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Entries of all heads and their costs, those of most keys first.

    Entries of about the same cost are ordered by head: programs that run at the same time then read the same keys.
    """
    cost = np.stack(costs)
    heads = np.repeat(np.arange(len(costs)), len(segment))
    rank = -(cost.ravel() * _RANKS // max(int(cost.max(initial=0)), 1))
    order = np.lexsort((-cost.ravel(), heads, rank))
    tile = order % max(len(segment), 1)
    entries = np.stack([segment[tile], first[tile], heads[order]], axis=1).astype(np.int32)
    return entries, cost.ravel()[order]


_BESIDE_TILES = 4
"""Tiles that could be computed in the time in which an item begins and ends, about, on an H200."""
_FEW_TURNS = 8
"""Items of a program, on average, up to which it matters who computes which one."""


def dealt(
    entries: NDArray[np.int32], costs: NDArray[np.int64], parts: int, programs: int
) -> NDArray[np.int32]:
    """The items of all entries, in rows of as many as there are programs: each computes a column.

    Args:
        entries: `[entries, 3]`: segment, first row, key/value head.
        costs: `[entries]`, those of most cost first.
        parts: Items of an entry, numbered on from those of the head before.
        programs: Columns; 0 for a single row.

    Returns:
        `[items, 3]`: segment, first row, number of the part, -1 where a column has no further item.
    """
    items = entries.repeat(parts, axis=0)
    items[:, 2] = items[:, 2] * parts + np.tile(np.arange(parts, dtype=np.int32), len(entries))
    if not programs or len(items) <= programs:
        return items
    none = np.array([0, 0, -1], dtype=np.int32)
    if len(items) > _FEW_TURNS * programs:
        # every other row is turned round, so that columns come to about the same
        missing = -len(items) % programs
        rows = np.concatenate([items, np.tile(none, (missing, 1))]).reshape(-1, programs, 3)
        rows[1::2] = rows[1::2, ::-1].copy()
        return rows.reshape(-1, 3)
    # half a row at a time, the longest item to the column that has least to do
    cost, step = costs.repeat(parts), max(programs // 2, 1)
    loads, column = np.zeros(programs, dtype=np.int64), np.empty(len(items), dtype=np.int64)
    for begin in range(0, len(items), step):
        some = cost[begin : begin + step]
        least = np.argsort(loads, kind="stable")[: len(some)]
        loads[least] += some
        column[begin : begin + step] = least
    counts = np.bincount(column, minlength=programs)
    order = np.argsort(column, kind="stable")
    place = np.arange(len(items)) - np.repeat(counts.cumsum() - counts, counts)
    rows = np.tile(none, (int(counts.max()), programs, 1))
    rows[place, column[order]] = items[order]
    return rows.reshape(-1, 3)
