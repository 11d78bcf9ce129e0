"""Work tables of the launches: segments, windows per head and work items, as small tensors on the device."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...attention.structure import CallStructure, Segment
from ..capability import GRID
from ..launcher import BYTES
from ..windows import ALL, HeadWindows
from .dealing import balanced, beside_tiles, taken, turned, uneven
from .reads import Blocks

_ALIGNED = BYTES // 4
"""Numbers at whose multiples each table begins."""

MOST_ENTRIES = GRID // 4 * 4
"""Entries of one launch; those of the next one begin at a multiple of 16 bytes, too."""


class Tables(NamedTuple):
    """What kernels read of a launch.

    Attributes:
        segments: int32 `[segments, 6]`.
        entries: int32 `[entries, 3]`: segment, first row, key/value head; those with most to do come first; or
            items in rows of as many as there are programs, each of which computes a column, -1 for none.
        rules: int32 `[kv_heads, 2]`, window and sinks; the entries where no head has a window.
    """

    segments: Tensor
    entries: Tensor
    rules: Tensor

    def launches(self) -> tuple[Tensor, ...]:
        """The entries of each launch: of more than one for very many documents alone."""
        entries = self.entries
        return (entries,) if entries.shape[0] <= MOST_ENTRIES else entries.split(MOST_ENTRIES)


@functools.cache
def window_table(windows: HeadWindows, device: torch.device) -> Tensor:
    """int32 `[kv_heads, 2]`, window and sinks of each head; kept for good, as captured graphs hold its address."""
    with torch.inference_mode(False):
        return torch.tensor(windows, dtype=torch.int32, device="cpu").to(device)


class Kind(NamedTuple):
    """What tables depend on beside runs and windows; layers of a plan differ in their windows alone.

    Attributes:
        of: What the blocks are of.
        blocks: Queries and keys per tile, or keys per piece of one.
        kv_heads: Key/value heads.
        device: Where the tables go.
        parts: Items that an entry is told as, numbered on from those of the head before, which are dealt out to
            programs; 0 for entries as they are.
        pieces: Of a tile.
        programs: That compute the items in turn.
    """

    of: Literal["queries", "keys"]
    blocks: tuple[int, int]
    kv_heads: int
    device: torch.device
    parts: int = 0
    pieces: int = 1
    programs: int = 0


class Sheet:
    """What launches over some runs have to do, and their tables, for heads of any windows.

    Attributes:
        kind: Of the tables.
        count: Entries.
        ends: Whether every run's keys end with one of their tiles or with the tensor.
        dealt: Whether it matters which program computes which items.
    """

    def __init__(self, found: Blocks, kind: Kind) -> None:
        """Of the blocks of some runs."""
        self.found, self.kind = found, kind
        self.count, self.ends = len(found.segment) * kind.kv_heads, found.ends
        self.dealt = kind.parts > 0 and uneven(self.count * kind.parts, kind.programs)
        self._made: dict[HeadWindows | None, Tables] = {}

    def read(self, windows: HeadWindows | None) -> int:
        """What all entries read, in keys for blocks of queries and in queries for blocks of keys."""
        return sum(self.found.read(*rule)[1] for rule in self._rules(windows))

    def _rules(self, windows: HeadWindows | None) -> HeadWindows:
        return windows or ((ALL, 0),) * self.kind.kv_heads

    def tables(self, windows: HeadWindows | None) -> Tables:
        """Those for heads with windows of `head_windows`, made once."""
        if windows not in self._made:
            (self._made[windows],) = self.make([windows])
        return self._made[windows]

    def make(self, windows: Sequence[HeadWindows | None]) -> list[Tables]:
        """Tables for heads with each of some windows of `head_windows`."""
        found, kind = self.found, self.kind
        rules = [self._rules(one) for one in windows]
        limits = np.array(rules)
        reads = np.array([[found.read(*rule)[0] for rule in one] for one in rules], dtype=np.int64)
        places = found.places(kind.kv_heads)
        if not kind.parts:
            items = places.take(found.longest_first(reads), axis=0)
            return _placed(found.runs, items, limits, windows, kind.device)
        count = self.count * kind.parts
        if self.dealt:
            edges = found.stands >= limits[..., :1]
            tiles = -(-reads // (kind.blocks[1] * kind.pieces)) + beside_tiles(edges)
            slots = balanced(tiles.reshape(len(rules), -1).repeat(kind.parts, axis=1), kind.programs)
        else:
            numbers = found.longest_first(reads)[..., None] * kind.parts + np.arange(kind.parts)
            none = np.full((len(rules), 1), count)
            numbers = np.concatenate([numbers.reshape(len(rules), -1), none], axis=1)
            slots = taken(numbers, turned(count, kind.programs)[None])
        entry, part = np.divmod(slots, kind.parts)
        items = places.take(entry, axis=0)
        if kind.parts > 1:
            items[..., 2] = np.where(slots < count, items[..., 2] * kind.parts + part, -1)
        return _placed(found.runs, items, limits, windows, kind.device)


def sheet_of(
    kind: Kind, structure: CallStructure, segments: Sequence[Segment], silent: Sequence[Segment] = ()
) -> Sheet:
    """Blocks of queries, by the number of keys that they read, or of keys, by the number of queries that read them.

    Args:
        kind: Of the tables.
        structure: The call's.
        segments: Its runs, or some of them: of one structure always all, or parts that begin with different ones.
        silent: Runs of queries without keys, which come last; see `silent_runs`.
    """
    same = "triton", len(silent), len(segments), *segments[:1]

    def find() -> Sheet:
        runs = (*segments, *silent)
        causal, kv_len = structure.causal, structure.kv_len  # tables are not to keep the structure

        def blocks() -> Blocks:
            return Blocks(kind.of == "queries", causal, kv_len, runs, kind.blocks)

        return Sheet(structure.cached(("blocks", kind.of, kind.blocks, *same), blocks), kind)

    return structure.cached(("sheet", kind, *same), find)


def silent_runs(structure: CallStructure) -> list[Segment]:
    """The runs of queries between all segments and around them: they see no key, and stand before the first."""
    found, n = [], structure.q_len
    taken: list[list[tuple[int, int]]] = [[] for _ in range(structure.batch)]
    for s in structure.segments() or ():
        taken[s.row].append((s.q_start, s.q_start + s.q_len))
    for row, runs in enumerate(taken):
        for (_, stop), (start, _) in itertools.pairwise([(0, 0), *sorted(runs), (n, n)]):
            if start > stop:
                found.append(Segment(row, stop, start - stop, 0, 0, stop - start))
    return found


def _placed(
    segments: NDArray[np.int32],
    entries: NDArray[np.int32],
    limits: NDArray[np.int64],
    windows: Sequence[HeadWindows | None],
    device: torch.device,
) -> list[Tables]:
    """The tables in one copy to the device, each of them at an address for which Triton compiles the same variant."""
    numbers: list[NDArray[Any]] = [segments.reshape(1, segments.size), entries, limits]
    flat = [one.reshape(len(one), math.prod(one.shape[1:])) for one in numbers]
    shapes = [(len(one), -(-one.shape[1] // _ALIGNED) * _ALIGNED) for one in flat]
    sizes = [math.prod(shape) for shape in shapes]
    whole = np.zeros(sum(sizes), dtype=np.int32)
    for room, shape, one in zip(np.split(whole, np.cumsum(sizes)[:-1]), shapes, flat, strict=True):
        room.reshape(shape)[:, : one.shape[1]] = one
    parts = torch.from_numpy(whole).to(device, non_blocking=True).split(sizes)
    runs, items, rules = (
        part.view(shape)[:, : one.shape[1]].unbind(0)
        for part, shape, one in zip(parts, shapes, flat, strict=True)
    )
    run = runs[0].view(-1, 6)
    return [
        Tables(run, item.view(-1, 3), item.view(-1, 3) if of is None else rule.view(-1, 2))
        for item, rule, of in zip(items, rules, windows, strict=True)
    ]
