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
from .reads import Blocks

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
    same = "triton", of, blocks, len(silent), len(segments), *segments[:1]
    key = (*same, windows, kv_heads, device, parts, pieces, programs)

    def find() -> Work:
        runs = (*segments, *silent)
        causal, kv_len = structure.causal, structure.kv_len  # tables are not to keep the structure

        def make() -> Work:
            found = structure.cached(
                ("blocks", *same), lambda: Blocks(of == "queries", causal, kv_len, runs, blocks)
            )
            reads = [found.read(*rule) for rule in windows or ((ALL, 0),) * kv_heads]

            def tables(evenly: bool) -> Tables:
                entries, costs = found.longest_first([each for each, _ in reads])
                if parts:
                    stands = entries[:, 1] + found.runs[entries[:, 0], 5]
                    edges = windows is not None and stands >= np.array(windows)[entries[:, 2], 0]
                    tiles = -(-costs // (blocks[1] * pieces)) + beside_tiles(edges)
                    entries = dealt(entries, tiles, parts, programs, evenly)
                return _placed(found.runs, entries, windows, device)

            count, read = len(found.segment) * len(reads), sum(all_of_them for _, all_of_them in reads)
            evenly = partial(tables, True) if parts and uneven(count * parts, programs) else None
            return Work(count, read, found.ends, partial(tables, False), evenly)

        return _made.get((key, causal, kv_len, runs), make)

    return structure.cached(key, find)


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
