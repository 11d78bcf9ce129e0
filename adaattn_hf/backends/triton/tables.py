"""Work tables of the launches: segments, windows per head and work items, as small tensors on the device."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...attention.structure import CallStructure, Segment
from ..capability import GRID
from ..launcher import BYTES
from ..remembered import Remembered
from ..windows import ALL, HeadWindows
from .dealing import balanced, beside_tiles, taken, turned, uneven
from .reads import Blocks

_made = Remembered(256)
"""Tables of the last few kinds of calls, so that calls of one shape make theirs once."""
_lock = threading.Lock()
_lately: dict[Kind, dict[HeadWindows | None, dict[HeadWindows | None, None]]] = {}
"""By kind and by windows, the last ones at the end: all windows of whose tables the same runs were asked."""
_MOST_WINDOWS, _TOGETHER = 256, 1 << 18
"""How many are kept, and entries of all tables that are made together: more of them take as long alone."""
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


class Work:
    """What is to be done by a launch, and its tables, which are made where they are asked for."""

    def __init__(self, sheet: Sheet, windows: HeadWindows | None, evenly: bool = False) -> None:
        """Of a launch.

        Args:
            sheet: Of its runs.
            windows: Of `head_windows`.
            evenly: Whether items are dealt out evenly.
        """
        kind, found = sheet.kind, sheet.found
        rules = windows or ((ALL, 0),) * kind.kv_heads
        self.count = len(found.segment) * len(rules)
        """Entries."""
        self.read = sum(found.read(*rule)[1] for rule in rules)
        """What all entries read, in keys for blocks of queries and in queries for blocks of keys."""
        self.ends = found.ends
        """Whether every segment's keys end with one of their tiles or with the tensor."""
        self._sheet, self._windows, self._evenly = sheet, windows, evenly

    @cached_property
    def tables(self) -> Tables:
        """On the device."""
        if self._evenly:
            return self._sheet.make([self._windows], evenly=True)[0]
        return self._sheet.tables(self._windows)

    def again(self) -> Work | None:
        """The same work, dealt out evenly, for launches that come again; None where it is, or need not be."""
        kind = self._sheet.kind
        able = not self._evenly and kind.parts and uneven(self.count * kind.parts, kind.programs)
        return Work(self._sheet, self._windows, evenly=True) if able else None

    def launches(self) -> tuple[Tensor, ...]:
        """The entries of each launch: of more than one for very many documents alone."""
        entries = self.tables.entries
        return (entries,) if len(entries) <= MOST_ENTRIES else entries.split(MOST_ENTRIES)


class Sheet:
    """The tables of some runs for heads of different windows, made together for all that are likely to be asked for.

    A prompt of a length that was not met before needs one for each layer of a plan: its first layer has them made for
    all windows that came with its own in an earlier prompt, in one go and one copy to the device.
    """

    def __init__(self, found: Blocks, kind: Kind) -> None:
        """Of the blocks of some runs."""
        self.found, self.kind = found, kind
        self._made: dict[HeadWindows | None, Tables] = {}
        self._asked: dict[HeadWindows | None, None] = {}

    def tables(self, windows: HeadWindows | None) -> Tables:
        """Those for heads with windows of `head_windows`."""
        with _lock:
            lately = _lately.setdefault(self.kind, {})
            together = list(lately.pop(windows, ()))
            self._asked[windows] = None
            lately[windows] = self._asked
            if len(lately) > _MOST_WINDOWS:
                del lately[next(iter(lately))]
        if windows not in self._made:
            each = max(len(self.found.segment) * self.kind.kv_heads, 1)
            others = [one for one in together if one not in self._made and one != windows]
            wanted = [windows, *others[: max(_TOGETHER // each - 1, 0)]]
            self._made.update(zip(wanted, self.make(wanted), strict=True))
        return self._made[windows]

    def make(self, windows: Sequence[HeadWindows | None], evenly: bool = False) -> list[Tables]:
        """Tables for heads with each of some windows.

        Args:
            windows: Of `head_windows`.
            evenly: Have programs end together; see `balanced`.
        """
        found, kind = self.found, self.kind
        rules = [one or ((ALL, 0),) * kind.kv_heads for one in windows]
        limits = np.array(rules)
        reads = np.array([[found.read(*rule)[0] for rule in one] for one in rules], dtype=np.int64)
        order, places = found.longest_first(reads), found.places(kind.kv_heads)
        if not kind.parts:
            return _placed(found.runs, places.take(order, axis=0), limits, windows, kind.device)
        count = order.shape[1] * kind.parts
        if uneven(count, kind.programs):
            edges = found.stands >= limits[..., :1]
            tiles = -(-reads // (kind.blocks[1] * kind.pieces)) + beside_tiles(edges)
            costs = taken(tiles.reshape(len(rules), -1), order).repeat(kind.parts, axis=1)
            slots = balanced(costs, kind.programs, evenly)
        else:
            slots = turned(count, kind.programs)[None]
        entry, part = np.divmod(slots, kind.parts) if kind.parts > 1 else (slots, 0)
        none = np.full((len(rules), 1), len(places) - 1)
        items = places.take(taken(np.concatenate([order, none], axis=1), entry), axis=0)
        if kind.parts > 1:
            items[..., 2] = np.where(slots < count, items[..., 2] * kind.parts + part, -1)
        return _placed(found.runs, items, limits, windows, kind.device)


def work_of(
    kind: Kind,
    structure: CallStructure,
    segments: Sequence[Segment],
    windows: HeadWindows | None,
    silent: Sequence[Segment] = (),
) -> Work:
    """Blocks of queries, by the number of keys that they read, or of keys, by the number of queries that read them.

    Args:
        kind: Of the tables.
        structure: The call's.
        segments: Its runs, or some of them: of one structure always all, or parts that begin with different ones.
        windows: Of `head_windows`.
        silent: Runs of queries without keys, which come last; see `silent_runs`.
    """
    same = "triton", len(silent), len(segments), *segments[:1]

    def find() -> Work:
        runs = (*segments, *silent)
        causal, kv_len = structure.causal, structure.kv_len  # tables are not to keep the structure

        def blocks() -> Blocks:
            return Blocks(kind.of == "queries", causal, kv_len, runs, kind.blocks)

        def make() -> Sheet:
            return Sheet(structure.cached(("blocks", kind.of, kind.blocks, *same), blocks), kind)

        sheet = structure.cached(
            ("sheet", kind, *same), lambda: _made.get((kind, causal, kv_len, runs), make)
        )
        return Work(sheet, windows)

    return structure.cached((kind, windows, *same), find)


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
    segments: NDArray[np.int32],
    entries: NDArray[np.int32],
    limits: NDArray[np.int64],
    windows: Sequence[HeadWindows | None],
    device: torch.device,
) -> list[Tables]:
    """The tables in one copy to the device, each of them at an address for which Triton compiles the same variant."""
    numbers: list[NDArray[Any]] = [segments.reshape(1, -1), entries, limits]
    flat = [one.reshape(len(one), -1) for one in numbers]
    widths = [-(-one.shape[1] // _ALIGNED) * _ALIGNED for one in flat]
    rooms = [np.zeros((len(one), width), dtype=np.int32) for one, width in zip(flat, widths, strict=True)]
    for room, one in zip(rooms, flat, strict=True):
        room[:, : one.shape[1]] = one
    table = torch.from_numpy(np.concatenate([room.ravel() for room in rooms])).to(device, non_blocking=True)
    runs, items, rules = (
        part.view(-1, width)[:, : one.shape[1]].unbind(0)
        for part, width, one in zip(table.split([room.size for room in rooms]), widths, flat, strict=True)
    )
    run = runs[0].view(-1, 6)
    return [
        Tables(run, item.view(-1, 3), item.view(-1, 3) if of is None else rule.view(-1, 2))
        for item, rule, of in zip(items, rules, windows, strict=True)
    ]
