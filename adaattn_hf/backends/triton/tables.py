"""Work tables of the launches, made on the device: runs, blocks in the order of their work, windows per head."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ...attention.heads import ALL, HeadWindows
from ...attention.structure import CallStructure, Segment
from ..base import derived_on
from . import dealing as kernels
from .launcher import Launcher

launch_repeat, launch_cut, launch_order = Launcher(kernels.repeat), Launcher(kernels.cut), Launcher(kernels.order)
launch_costs, launch_deal = Launcher(kernels.costs), Launcher(kernels.deal)
_CLASSES = 16
"""Classes of work, within which blocks are ordered by head: programs that run at the same time read the same keys."""
_LINE, _SQUARE = 256, 64
"""Runs or blocks that a program looks at together, and blocks that it compares with as many."""


class Cut(NamedTuple):
    """How runs are cut into blocks of so many queries, or keys.

    With `least`, only those whose last tile of so many keys reaches no others; with `short` those that it leaves out.
    """

    of: Literal["queries", "keys"]
    block: int
    least: int = 0
    short: bool = False


class Dealing(NamedTuple):
    """What is dealt out to the programs of a persistent kernel, as many as run at once.

    `parts` are items of a block and key/value head: groups of its query heads. A tile has `pieces` of `piece` keys.
    """

    parts: int
    piece: int
    pieces: int
    programs: int


@functools.cache
def window_table(windows: HeadWindows, device: torch.device) -> Tensor:
    """int32 `[kv_heads, 2]`, window and sinks of each head; kept for good, as captured graphs hold its address."""
    with torch.inference_mode(False):
        return torch.tensor(windows, dtype=torch.int32, device="cpu").to(device, non_blocking=True)


def ends_with_tiles(run: Segment, columns: int, kv_len: int) -> bool:
    """Whether no tile of a run's keys reaches those behind them, of which a tensor has `kv_len`."""
    return run.k_len % columns == 0 or run.k_start + run.k_len == kv_len


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


def runs_of(structure: CallStructure, least: int = 0, short: bool = False) -> tuple[Segment, ...]:
    """The runs that a `Cut` is of; those without keys belong to the short ones where there are any."""
    segments, silent = structure.segments() or (), structure.derived(silent_runs)
    if not least:
        return (*segments, *silent)
    parts: tuple[list[Segment], list[Segment]] = ([], [])
    for run in segments:
        parts[run.k_len < least and not ends_with_tiles(run, least, structure.kv_len)].append(run)
    parts[bool(parts[1])].extend(silent)
    return tuple(parts[short])


def pairs_seen(structure: CallStructure, windows: HeadWindows, least: int = 0) -> int:
    """Pairs of queries and keys that key/value heads with these windows see, of the runs that `runs_of` says.

    Of windows that look both ways it counts no end of a run.
    """
    total = 0
    for (window, sinks), heads in Counter(windows).items():
        for run in structure.derived(runs_of, least):
            if structure.causal:
                # a query at p sees keys from 0 to p, less those before its window, of which sinks stay
                behind = (0, run.k_len, window + sinks, window + run.k_len)
                first, last = run.offset + 1, run.offset + run.q_len
                seen = [_triangle(last - n) - _triangle(first - 1 - n) for n in behind]
                total += heads * max(0, seen[0] - seen[1] - seen[2] + seen[3])
            else:
                total += heads * run.q_len * min(run.k_len, 2 * window - 1 + sinks)
    return total


def _triangle(n: int) -> int:
    return n * (n + 1) // 2 if n > 0 else 0


def find_runs(structure: CallStructure, device: torch.device, least: int, short: bool) -> Tensor:
    """int32 `[runs, 6]`, as kernels take them; those of a structure without tensors are not copied from the host."""
    runs = structure.derived(runs_of, least, short)
    if structure.plain and len(runs) == structure.batch:
        table = torch.empty((structure.batch, 6), dtype=torch.int32, device=device)
        _run(launch_repeat, (structure.batch,), (table, *runs[0][1:]), {})
        return table
    table = torch.tensor(runs, dtype=torch.int32, device="cpu").view(-1, 6)
    return table.to(device, non_blocking=True)


def _run(launch: Launcher, extents: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """Launches what writes a table: lengths are not compiled in, and tensors are made here: constants tell variants."""
    launch(extents, arguments, constants, () if arguments[0].is_cuda else None)


def find_blocks(structure: CallStructure, device: torch.device, cut: Cut) -> tuple[Tensor, Tensor]:
    """Runs, and int32 `[blocks, 3]`: run, first row in that and class of work of each of their blocks.

    Windows are left out: of each head those with most to do have most under any window, or as much as all others.
    """
    lengths = 2 if cut.of == "queries" else 4
    count = sum(-(-run[lengths] // cut.block) for run in structure.derived(runs_of, cut.least, cut.short))
    runs = derived_on(structure, device, find_runs, cut.least, cut.short)
    blocks = runs.new_empty((count, 3))
    constants = {
        "OF_QUERIES": cut.of == "queries", "CAUSAL": structure.causal, "BLOCK": cut.block, "CLASSES": _CLASSES,
        "LINE": _LINE,
    }  # fmt: skip
    if count:
        _run(launch_cut, (len(runs),), (runs, blocks, len(runs)), constants)
    return runs, blocks


def find_entries(structure: CallStructure, device: torch.device, cut: Cut, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Runs, and int32 `[entries, 3]`: run, first row and key/value head of each block, those with most to do first."""
    runs, blocks = derived_on(structure, device, find_blocks, cut)
    entries = runs.new_empty((kv_heads * len(blocks), 3))
    constants = {"LAST_FIRST": cut.of == "queries", "LINE": _SQUARE}
    if len(blocks):
        programs = -(-len(blocks) // _SQUARE)
        _run(launch_order, (programs,), (blocks, entries, len(blocks), kv_heads), constants)
    return runs, entries


def find_items(
    structure: CallStructure, device: torch.device, cut: Cut, dealing: Dealing, windows: HeadWindows
) -> tuple[Tensor, Tensor, int]:
    """Runs, the table of items that `deal` makes, and for how many programs."""
    runs, table = derived_on(structure, device, find_blocks, cut)
    blocks, heads = len(table), len(windows) * dealing.parts
    count = blocks * heads
    programs = min(dealing.programs, count)
    # in each turn a program is given one item at most, of half a row
    turns = -(-count // max(programs // 2, 1)) + 2
    cost = runs.new_empty((heads, blocks))
    constants: dict[str, Any] = {
        "CAUSAL": structure.causal, "ROWS": cut.block, "PART": dealing.piece, "PIECES": dealing.pieces, "LINE": _LINE,
    }  # fmt: skip
    arguments = runs, table, window_table(windows, device), cost, blocks, dealing.parts
    _run(launch_costs, (-(-blocks // _LINE), heads), arguments, constants)
    cost, order = cost.flatten().sort(descending=True, stable=True)
    items = runs.new_empty((turns * programs, 3))
    lanes = max(16, 1 << (programs - 1).bit_length())
    constants = {"LANES": lanes, "num_warps": 8}
    _run(launch_deal, (1,), (table, order, cost, items, blocks, count, programs), constants)
    return runs, items, programs


def exact_windows(kv_heads: int) -> HeadWindows:
    """Windows that leave nothing out."""
    return ((ALL, 0),) * kv_heads
