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
from .dealing import costs, deal
from .launcher import Launcher

launch_costs, launch_deal = Launcher(costs), Launcher(deal)
_CLASSES = 16
"""Classes of work, within which blocks are ordered by head: programs that run at the same time read the same keys."""
_LINE = 256
"""Blocks whose costs a program computes."""


class Cut(NamedTuple):
    """How runs are cut into blocks.

    Attributes:
        of: What the blocks are of.
        block: Queries, or keys, of a block.
        least: 0 for blocks of all runs; else of those whose last tile of so many keys reaches no others.
        short: Of the runs that `least` leaves out, instead.
    """

    of: Literal["queries", "keys"]
    block: int
    least: int = 0
    short: bool = False


class Dealing(NamedTuple):
    """What is dealt out to the programs of a persistent kernel.

    Attributes:
        parts: Items of a block and key/value head: groups of its query heads.
        piece: Keys of a piece of a tile.
        pieces: Pieces of a tile.
        programs: As many as run at once.
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
        row = torch.arange(structure.batch, dtype=torch.int32, device=device)
        return torch.stack([row, *(torch.full_like(row, number) for number in runs[0][1:])], dim=1)
    table = torch.tensor(runs, dtype=torch.int32, device="cpu").view(-1, 6)
    return table.to(device, non_blocking=True)


def find_blocks(structure: CallStructure, device: torch.device, cut: Cut) -> tuple[Tensor, Tensor, Tensor]:
    """Runs, and of each of their blocks int64 `[blocks]` the run and its first row in that."""
    lengths = 2 if cut.of == "queries" else 4
    count = sum(-(-run[lengths] // cut.block) for run in structure.derived(runs_of, cut.least, cut.short))
    runs = derived_on(structure, device, find_runs, cut.least, cut.short)
    blocks = (runs[:, lengths].long() + (cut.block - 1)) // cut.block
    run = torch.repeat_interleave(blocks, output_size=count)
    first = (torch.arange(count, device=device) - (blocks.cumsum(0) - blocks)[run]) * cut.block
    return runs, run, first


def find_entries(structure: CallStructure, device: torch.device, cut: Cut, kv_heads: int) -> Tensor:
    """int32 `[entries, 3]`: run, first row and key/value head of each block, those with most to do first.

    Windows change no order: of each head those with most to do have most under any window, or as much as all others.
    """
    runs, run, first = derived_on(structure, device, find_blocks, cut)
    if not len(run):
        return runs.new_empty((0, 3))
    if cut.of == "queries":
        run, first = run.flip(0), first.flip(0)
    q_len, _, k_len, offset = runs[run, 2:].long().unbind(1)
    if cut.of == "queries":
        work = torch.minimum(k_len, first + offset + cut.block) if structure.causal else k_len
    else:
        work = q_len - (first - offset).clamp(min=0) if structure.causal else q_len
    work = work.clamp(min=0) * _CLASSES // (work.max().clamp(min=0) + 1)
    order = work.repeat(kv_heads).argsort(descending=True, stable=True)
    block = order % len(run)
    return torch.stack([run[block], first[block], order // len(run)], dim=1).int()


def find_items(
    structure: CallStructure, device: torch.device, cut: Cut, dealing: Dealing, windows: HeadWindows
) -> tuple[Tensor, int]:
    """The table of items that `deal` makes, and for how many programs."""
    runs, run, first = derived_on(structure, device, find_blocks, cut)
    blocks, heads = len(run), len(windows) * dealing.parts
    count = blocks * heads
    programs = min(dealing.programs, count)
    # in each turn a program is given one item at most, of half a row
    turns = -(-count // max(programs // 2, 1)) + 2
    cost = torch.empty((heads, blocks), dtype=torch.int32, device=device)
    constants = {
        "CAUSAL": structure.causal, "ROWS": cut.block, "PART": dealing.piece, "PIECES": dealing.pieces, "LINE": _LINE,
    }  # fmt: skip
    # lengths are not compiled in, and tensors are made here: there is one variant for each set of constants
    variant = () if device.type == "cuda" else None
    arguments: tuple[Any, ...] = (
        runs, run, first, window_table(windows, device), cost, blocks, dealing.parts
    )  # fmt: skip
    launch_costs((-(-blocks // _LINE), heads), arguments, constants, variant)
    cost, order = cost.flatten().sort(descending=True, stable=True)
    items = torch.empty((turns * programs, 3), dtype=torch.int32, device=device)
    lanes = max(16, 1 << (programs - 1).bit_length())
    arguments = run, first, order, cost, items, blocks, count, programs
    launch_deal((1,), arguments, {"LANES": lanes, "num_warps": 8}, variant)
    return items, programs


def exact_windows(kv_heads: int) -> HeadWindows:
    """Windows that leave nothing out."""
    return ((ALL, 0),) * kv_heads
