"""Work tables of the launches: segments, windows per head and work items, as small tensors on the device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...attention.structure import CallStructure, Segment
from ..capability import GRID
from ..remembered import Remembered
from ..windows import ALL, HeadWindows
from .dealing import beside_tiles, dealt, uneven

_made = Remembered(256)
"""Tables of the last few kinds of calls, so that calls of one shape make theirs once."""


MOST_ENTRIES = GRID // 4 * 4
"""Entries of one launch; those of the next one begin at a multiple of 16 bytes, too."""


class Tables(NamedTuple):
    """What kernels read of a launch.

    Attributes:
        segments: int32 `[segments, 6]`.
        entries: int32 `[entries, 3]`: segment, first row, key/value head; those with most to do come first; or
            the items of `dealt`.
        rules: int32 `[kv_heads, 2]`, window and sinks; the entries where no head has a window.
    """

    segments: Tensor
    entries: Tensor
    rules: Tensor


class Work:
    """What is to be done by a launch, and its tables, which are made where they are asked for."""

    def __init__(
        self,
        count: int,
        read: int,
        ends: bool,
        make: Callable[[], Tables],
        evenly: Callable[[], Tables] | None = None,
    ) -> None:
        """Of work whose tables are made at first use.

        Args:
            count: Entries.
            read: What all entries read, in keys for blocks of queries and in queries for blocks of keys.
            ends: Whether every segment's keys end with one of their tiles or with the tensor.
            make: Makes the tables.
            evenly: Makes them with items that are dealt out evenly, where that is another thing.
        """
        self.count, self.read, self.ends = count, read, ends
        self._make, self._evenly = make, evenly

    @cached_property
    def tables(self) -> Tables:
        """On the device."""
        return self._make()

    def again(self) -> Work | None:
        """The same work, dealt out evenly, for launches that come again; None where it is, or need not be."""
        return None if self._evenly is None else Work(self.count, self.read, self.ends, self._evenly)

    def launches(self) -> tuple[Tensor, ...]:
        """The entries of each launch: of more than one for very many documents alone."""
        entries = self.tables.entries
        return (entries,) if len(entries) <= MOST_ENTRIES else entries.split(MOST_ENTRIES)


def work_of(
    of: Literal["queries", "keys"],
    structure: CallStructure,
    segments: Sequence[Segment],
    windows: HeadWindows | None,
    kv_heads: int,
    blocks: tuple[int, int],
    device: torch.device,
    silent: Sequence[Segment] = (),
    parts: int = 0,
    pieces: int = 1,
    programs: int = 0,
) -> Work:
    """Blocks of queries, by the number of keys that they read, or of keys, by the number of queries that read them.

    Args:
        of: What the blocks are of.
        structure: The call's.
        segments: Its runs, or some of them: of one structure always all, or parts that begin with different ones.
        windows: Of `head_windows`.
        kv_heads: Key/value heads.
        blocks: Queries and keys per tile, or keys per piece of one.
        device: Where the tables go.
        silent: Runs of queries without keys, which come last; see `silent_runs`.
        parts: Items that an entry is told as, by `dealt`; 0 for none.
        pieces: Of a tile.
        programs: That compute the items in turn.
    """
    key = (
        "triton",
        of,
        windows,
        kv_heads,
        blocks,
        device,
        len(silent),
        len(segments),
        *segments[:1],
        parts,
        pieces,
        programs,
    )

    def find() -> Work:
        runs = (*segments, *silent)
        causal, kv_len = structure.causal, structure.kv_len  # tables are not to keep the structure

        def make() -> Work:
            table = np.array(runs, dtype=np.int32).reshape(-1, 6)
            segment, first, cost = _costs(of == "queries", causal, runs, windows, kv_heads, blocks)

            def tables(evenly: bool) -> Tables:
                entries, costs = _longest_first(segment, first, cost)
                if parts:
                    stands = entries[:, 1] + table[entries[:, 0], 5]
                    edges = windows is not None and stands >= np.array(windows)[entries[:, 2], 0]
                    tiles = -(-costs // (blocks[1] * pieces)) + beside_tiles(edges)
                    entries = dealt(entries, tiles, parts, programs, evenly)
                return _placed(table, entries, windows, device)

            ends = all(ends_with_tiles(s, blocks[1], kv_len) for s in runs)
            evenly = partial(tables, True) if parts and uneven(cost.size * parts, programs) else None
            return Work(cost.size, int(cost.sum()), ends, partial(tables, False), evenly)

        return _made.get((key, causal, kv_len, runs), make)

    return structure.cached(key, find)


def ends_with_tiles(segment: Segment, columns: int, kv_len: int) -> bool:
    """Whether no tile of a segment reaches keys behind its own, of which a tensor has `kv_len`."""
    return segment.k_len % columns == 0 or segment.k_start + segment.k_len == kv_len


def silent_runs(structure: CallStructure, segments: Sequence[Segment]) -> list[Segment]:
    """The runs of queries between all segments and around them: they see no key, and stand before the first."""
    return structure.cached(("triton", "silent"), lambda: _silent(structure, segments))


def _silent(structure: CallStructure, segments: Sequence[Segment]) -> list[Segment]:
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
    segments: NDArray[np.int32], entries: NDArray[np.int32], windows: HeadWindows | None, device: torch.device
) -> Tables:
    """The tables in one copy to the device."""
    rules = np.array(windows or (), dtype=np.int32).ravel()
    parts = [segments.ravel(), entries.ravel(), rules]
    table = torch.from_numpy(np.concatenate(parts)).to(device, non_blocking=True)
    a, b, c = table.split([len(part) for part in parts])
    return Tables(a.view(-1, 6), b.view(-1, 3), c.view(-1, 2) if windows else b)


def _tiles(lengths: NDArray[np.int64], block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Segment and first row of every tile."""
    counts = -(-lengths // block)
    segment = np.repeat(np.arange(len(lengths)), counts)
    before = np.repeat(counts.cumsum() - counts, counts)
    return segment, (np.arange(len(segment)) - before) * block


def _costs(
    queries: bool,
    causal: bool,
    segments: Sequence[Segment],
    windows: HeadWindows | None,
    kv_heads: int,
    blocks: tuple[int, int],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Segment and first row of blocks of queries or of keys, and what each of them reads, `[kv_heads, blocks]`."""
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
    return segment, first, np.stack(costs)


_RANKS = 16
"""Classes of cost, from none to the largest, within which entries are ordered by head."""


def _longest_first(
    segment: NDArray[np.int64], first: NDArray[np.int64], cost: NDArray[np.int64]
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Entries of all heads and their costs, those of most keys first.

    Entries of about the same cost are ordered by head: programs that run at the same time then read the same keys.
    """
    heads = np.repeat(np.arange(len(cost)), len(segment))
    rank = -(cost.ravel() * _RANKS // max(int(cost.max(initial=0)), 1))
    order = np.lexsort((-cost.ravel(), heads, rank))
    tile = order % max(len(segment), 1)
    entries = np.stack([segment[tile], first[tile], heads[order]], axis=1).astype(np.int32)
    return entries, cost.ravel()[order]
