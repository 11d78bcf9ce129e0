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
from .dealing import beside_tiles, dealt

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
    pieces: int = 1,
    programs: int = 0,
) -> Work:
    """Blocks of queries, by the number of keys that they read, or of keys, by the number of queries that read them.

    Args:
        of: What the blocks are of.
        structure: The call's.
        segments: Its runs.
        windows: Of `head_windows`.
        kv_heads: Key/value heads.
        blocks: Queries and keys per tile, or keys per piece of one.
        device: Where the tables go.
        silent: Blocks of queries outside of all segments come last, as segments without keys.
        parts: Items that an entry is told as, by `dealt`; 0 for none.
        pieces: Of a tile.
        programs: That compute the items in turn.
    """
    key = ("triton", of, windows, kv_heads, blocks, device, silent, parts, pieces, programs)

    def find() -> Work:
        runs = (*segments, *(_silent(structure, segments) if silent else ()))

        def make() -> Work:
            entries, costs = _entries(of == "queries", structure.causal, runs, windows, kv_heads, blocks)
            read = int(costs.sum())
            table = np.array(runs, dtype=np.int32).reshape(-1, 6)
            if parts:
                stands = entries[:, 1] + table[entries[:, 0], 5]
                edges = windows is not None and stands >= np.array(windows)[entries[:, 2], 0]
                entries = dealt(
                    entries, -(-costs // (blocks[1] * pieces)) + beside_tiles(edges), parts, programs
                )
            ends = all(s.k_len % blocks[1] == 0 or s.k_start + s.k_len == structure.kv_len for s in runs)
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
