"""Work tables of the launches, made on the device: runs are cut into blocks, blocks put in order of their work, dealt out."""

import functools
import itertools
from collections import Counter
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...attention.heads import HeadWindows
from ...attention.structure import MaskStructure, Segment
from ..base import derived_on
from .launch import Launcher
from .tiling import Warps

_CLASSES = 16
"""Classes of work, within which blocks are ordered by head: programs that run at the same time read the same keys."""
_LINE, _SQUARE = 256, 64
"""Runs or blocks that a program looks at together, and blocks that it compares with as many."""


# lengths must not be compiled in: each new one would wait for the compiler
@Launcher
@triton.jit(do_not_specialize=["q_start", "q_len", "k_start", "k_len", "offset"])
def repeat_run(runs_ptr, q_start, q_len, k_start, k_len, offset):  # type: ignore[no-untyped-def]
    """Writes the same run for each batch row, by numbers that no tensor has to bring; programs are rows."""
    run = runs_ptr + 6 * tl.program_id(0)
    tl.store(run, tl.program_id(0))
    tl.store(run + 1, q_start)
    tl.store(run + 2, q_len)
    tl.store(run + 3, k_start)
    tl.store(run + 4, k_len)
    tl.store(run + 5, offset)


@triton.jit
def _work(q_len, k_len, offset, first, OF_QUERIES: tl.constexpr, CAUSAL: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # fmt: skip
    """Keys that some query of a block sees, or queries that see some key of one, as far as causality says it."""
    if OF_QUERIES:
        work = k_len
        if CAUSAL:
            work = tl.minimum(k_len, first + offset + BLOCK)
    else:
        work = q_len
        if CAUSAL:
            work = q_len - tl.maximum(first - offset, 0)
    return tl.maximum(work, 0)


@Launcher
@triton.jit(do_not_specialize=["runs"])
def cut_runs(  # type: ignore[no-untyped-def]
    runs_ptr, blocks_ptr, runs, OF_QUERIES: tl.constexpr, CAUSAL: tl.constexpr, BLOCK: tl.constexpr,
    CLASSES: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """Writes run, first row and class of work of each block, int32 `[blocks, 3]`; programs are runs."""
    run_number = tl.program_id(0)
    blocks_before = tl.zeros([LINE], tl.int32)
    max_work = tl.zeros([LINE], tl.int32)
    for begin in range(0, runs, LINE):
        run = begin + tl.arange(0, LINE)
        valid = run < runs
        q_len = tl.load(runs_ptr + 6 * run + 2, mask=valid, other=0)
        k_len = tl.load(runs_ptr + 6 * run + 4, mask=valid, other=0)
        offset = tl.load(runs_ptr + 6 * run + 5, mask=valid, other=0)
        if OF_QUERIES:
            blocks = tl.cdiv(q_len, BLOCK)
            heaviest = (blocks - 1) * BLOCK
        else:
            blocks = tl.cdiv(k_len, BLOCK)
            heaviest = tl.zeros_like(blocks)
        work = _work(q_len, k_len, offset, heaviest, OF_QUERIES, CAUSAL, BLOCK)
        blocks_before += tl.where(run < run_number, blocks, 0)
        max_work = tl.maximum(max_work, tl.where(blocks > 0, work, 0))
    start = blocks_ptr + 3 * tl.sum(blocks_before, 0)
    limit = tl.max(max_work, 0) + 1
    q_len = tl.load(runs_ptr + 6 * run_number + 2)
    k_len = tl.load(runs_ptr + 6 * run_number + 4)
    offset = tl.load(runs_ptr + 6 * run_number + 5)
    rows = q_len if OF_QUERIES else k_len
    for begin in range(0, tl.cdiv(rows, BLOCK), LINE):
        block = begin + tl.arange(0, LINE)
        first = block * BLOCK
        valid = first < rows
        work = _work(q_len, k_len, offset, first, OF_QUERIES, CAUSAL, BLOCK)
        tl.store(start + 3 * block, run_number, mask=valid)
        tl.store(start + 3 * block + 1, first, mask=valid)
        tl.store(start + 3 * block + 2, (work.to(tl.int64) * CLASSES // limit).to(tl.int32), mask=valid)


@Launcher
@triton.jit(do_not_specialize=["count", "kv_heads"])
def order_blocks(blocks_ptr, entries_ptr, count, kv_heads, LAST_FIRST: tl.constexpr, LINE: tl.constexpr):  # type: ignore[no-untyped-def] # fmt: skip
    """Writes run, first row and key/value head of all blocks and heads, those with most to do first.

    Those of a class are ordered by head, then as they come, with LAST_FIRST from the end; programs are LINE blocks.
    """
    block = tl.program_id(0) * LINE + tl.arange(0, LINE)
    valid = block < count
    level = tl.load(blocks_ptr + 3 * block + 2, mask=valid, other=0)
    heavier = tl.zeros([LINE], tl.int32)
    same = tl.zeros([LINE], tl.int32)
    before = tl.zeros([LINE], tl.int32)
    for begin in range(0, count, LINE):
        other = begin + tl.arange(0, LINE)
        other_level = tl.load(blocks_ptr + 3 * other + 2, mask=other < count, other=-1)
        equal = other_level[None, :] == level[:, None]
        earlier = other[None, :] > block[:, None] if LAST_FIRST else other[None, :] < block[:, None]
        heavier += tl.sum((other_level[None, :] > level[:, None]).to(tl.int32), 1)
        same += tl.sum(equal.to(tl.int32), 1)
        before += tl.sum((equal & earlier).to(tl.int32), 1)
    run = tl.load(blocks_ptr + 3 * block, mask=valid, other=0)
    first = tl.load(blocks_ptr + 3 * block + 1, mask=valid, other=0)
    for head in range(0, kv_heads):
        entry = entries_ptr + 3 * (heavier * kv_heads + head * same + before)
        tl.store(entry, run, mask=valid)
        tl.store(entry + 1, first, mask=valid)
        tl.store(entry + 2, head, mask=valid)


@Launcher
@triton.jit(do_not_specialize=["blocks", "parts"])
def cost_items(  # type: ignore[no-untyped-def]
    runs_ptr, blocks_ptr, rules_ptr, cost_ptr, blocks, parts, CAUSAL: tl.constexpr, ROWS: tl.constexpr,
    PART: tl.constexpr, PIECES: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """Tiles that items `[heads, blocks]` take, `parts` of a key/value head; programs are (LINE blocks, heads).

    One tile is added for how an item begins and ends, and one for its sinks and the edge of its window: about what both
    take on an H200.
    """
    heads = tl.program_id(1)
    block = tl.program_id(0) * LINE + tl.arange(0, LINE)
    valid = block < blocks
    run = runs_ptr + 6 * tl.load(blocks_ptr + 3 * block, mask=valid, other=0)
    first = tl.load(blocks_ptr + 3 * block + 1, mask=valid, other=0)
    q_len = tl.load(run + 2, mask=valid, other=0)
    k_len = tl.load(run + 4, mask=valid, other=0)
    offset = tl.load(run + 5, mask=valid, other=0)
    window = tl.load(rules_ptr + 2 * (heads // parts))
    sinks = tl.load(rules_ptr + 2 * (heads // parts) + 1)
    start = tl.maximum(first + offset - window + 1, 0) // PART * PART
    stop = tl.minimum(first + ROWS, q_len) + offset
    if not CAUSAL:
        stop += window - 1
    read = tl.maximum(tl.minimum(stop, k_len) - start, 0) + tl.minimum(sinks, start)
    cost = tl.cdiv(read, PART * PIECES) + 1 + (first + offset >= window).to(tl.int32)
    tl.store(cost_ptr + heads * blocks + block, cost.to(tl.int32), mask=valid)


@Launcher
@triton.jit(do_not_specialize=["blocks", "count", "programs"])
def deal_items(blocks_ptr, order_ptr, cost_ptr, items_ptr, blocks, count, programs, LANES: tl.constexpr):  # type: ignore[no-untyped-def] # fmt: skip
    """Deals items out, the longest first, half as many at a time as there are programs, to those that have least to do.

    `order` and `cost` hold the items' numbers and costs, sorted. The table `[turns, programs, 3]` begins with a row of
    how many items each program has; then come run, first row and heads of each; after the last one the heads are -1.
    """
    program = tl.arange(0, LANES)
    valid = program < programs
    load = tl.where(valid, 0, 1 << 30)
    dealt = tl.zeros([LANES], tl.int32)
    step = tl.maximum(programs // 2, 1)
    for begin in range(0, count, step):
        less = load[None, :] < load[:, None]
        less = less | ((load[None, :] == load[:, None]) & (program[None, :] < program[:, None]))
        rank = tl.sum(less.to(tl.int32), 1)
        takes = valid & (rank < step) & (begin + rank < count)
        number = tl.load(order_ptr + begin + rank, mask=takes, other=0)
        load += tl.load(cost_ptr + begin + rank, mask=takes, other=0)
        block = blocks_ptr + 3 * (number % blocks)
        item = items_ptr + 3 * ((dealt + 1) * programs + program)
        tl.store(item, tl.load(block, mask=takes, other=0), mask=takes)
        tl.store(item + 1, tl.load(block + 1, mask=takes, other=0), mask=takes)
        tl.store(item + 2, (number // blocks).to(tl.int32), mask=takes)
        dealt += takes.to(tl.int32)
    tl.store(items_ptr + 3 * program, dealt, mask=valid)
    item = items_ptr + 3 * ((dealt + 1) * programs + program)
    tl.store(item, 0, mask=valid)
    tl.store(item + 1, 0, mask=valid)
    tl.store(item + 2, -1, mask=valid)


class Blocking(NamedTuple):
    """How runs are cut into blocks of so many queries, or keys.

    With `least`, only those whose last tile of so many keys reaches no others; with `short` those that it leaves out.
    """

    of: Literal["queries", "keys"]
    block: int
    least: int = 0
    short: bool = False


@functools.lru_cache(1 << 14)
def window_table(windows: HeadWindows, device: torch.device) -> Tensor:
    """int32 `[kv_heads, 2]`, window and sinks of each head; so many are kept that a captured graph never loses its own.

    Such a graph holds the table's address, and does not ask for it again. Streams that find it there wait for nothing.
    """
    with torch.inference_mode(False):
        return torch.tensor(windows, dtype=torch.int32, device="cpu").to(device)


def ends_with_tiles(run: Segment, columns: int, kv_len: int) -> bool:
    """Whether no tile of a run's keys reaches those behind them, of which a tensor has `kv_len`."""
    return run.k_len % columns == 0 or run.k_start + run.k_len == kv_len


def silent_runs(structure: MaskStructure) -> list[Segment]:
    """The runs of queries between all segments and around them: they see no key, and stand before the first."""
    silent, n = [], structure.q_len
    covered: list[list[tuple[int, int]]] = [[] for _ in range(structure.batch)]
    for s in structure.segments() or ():
        covered[s.row].append((s.q_start, s.q_start + s.q_len))
    for row, runs in enumerate(covered):
        for (_, stop), (start, _) in itertools.pairwise([(0, 0), *sorted(runs), (n, n)]):
            if start > stop:
                silent.append(Segment(row, stop, start - stop, 0, 0, stop - start))
    return silent


def runs_of(structure: MaskStructure, least: int = 0, short: bool = False) -> tuple[Segment, ...]:
    """The runs that a `Blocking` is of; those without keys belong to the short ones where there are any."""
    segments, silent = structure.segments() or (), structure.cached(silent_runs)
    if not least:
        return (*segments, *silent)
    parts: tuple[list[Segment], list[Segment]] = ([], [])
    for run in segments:
        parts[run.k_len < least and not ends_with_tiles(run, least, structure.kv_len)].append(run)
    parts[bool(parts[1])].extend(silent)
    return tuple(parts[short])


def pairs_seen(structure: MaskStructure, windows: HeadWindows, least: int = 0) -> int:
    """Pairs of queries and keys that key/value heads with these windows see, of the runs that `runs_of` says.

    Of windows that look both ways it counts no end of a run.
    """

    def triangle(n: int) -> int:
        return n * (n + 1) // 2 if n > 0 else 0

    total = 0
    for (window, sinks), heads in Counter(windows).items():
        for run in structure.cached(runs_of, least):
            if structure.causal:
                # a query at p sees keys from 0 to p, less those before its window, of which sinks stay
                behind = (0, run.k_len, window + sinks, window + run.k_len)
                first, last = run.offset + 1, run.offset + run.q_len
                triangles = [triangle(last - n) - triangle(first - 1 - n) for n in behind]
                total += heads * max(0, triangles[0] - triangles[1] - triangles[2] + triangles[3])
            else:
                total += heads * run.q_len * min(run.k_len, 2 * window - 1 + sinks)
    return total


# The kernels' tensors are made here, and lengths are not compiled in: constants alone tell variants, all of kind ().


def find_runs(structure: MaskStructure, device: torch.device, least: int, short: bool) -> Tensor:
    """int32 `[runs, 6]`, as kernels take them; those of a structure without tensors are not copied from the host."""
    runs = structure.cached(runs_of, least, short)
    if structure.plain and len(runs) == structure.batch:
        table = torch.empty((structure.batch, 6), dtype=torch.int32, device=device)
        repeat_run((structure.batch,), (table, *runs[0][1:]), {}, ())
        return table
    table = torch.tensor(runs, dtype=torch.int32, device="cpu").view(-1, 6)
    return table.to(device, non_blocking=True)


def find_blocks(structure: MaskStructure, device: torch.device, cut: Blocking) -> tuple[Tensor, Tensor]:
    """Runs, and int32 `[blocks, 3]`: run, first row in that and class of work of each of their blocks.

    Windows are left out: of each head those with most to do have most under any window, or as much as all others.
    """
    lengths = 2 if cut.of == "queries" else 4
    count = sum(-(-run[lengths] // cut.block) for run in structure.cached(runs_of, cut.least, cut.short))
    runs = derived_on(structure, device, find_runs, cut.least, cut.short)
    blocks = runs.new_empty((count, 3))
    if count:
        constants = {
            "OF_QUERIES": cut.of == "queries", "CAUSAL": structure.causal, "BLOCK": cut.block, "CLASSES": _CLASSES,
            "LINE": _LINE,
        }  # fmt: skip
        cut_runs((len(runs),), (runs, blocks, len(runs)), constants, ())
    return runs, blocks


def find_entries(structure: MaskStructure, device: torch.device, cut: Blocking, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Runs, and int32 `[entries, 3]`: run, first row and key/value head of each block, those with most to do first."""
    runs, blocks = derived_on(structure, device, find_blocks, cut)
    count = len(blocks)
    entries = runs.new_empty((kv_heads * count, 3))
    if count:
        constants = {"LAST_FIRST": cut.of == "queries", "LINE": _SQUARE}
        order_blocks((-(-count // _SQUARE),), (blocks, entries, count, kv_heads), constants, ())
    return runs, entries


def find_items(
    structure: MaskStructure, device: torch.device, warps: Warps, windows: HeadWindows, most: int
) -> tuple[Tensor, Tensor, int]:
    """Runs, the table of items that `deal_items` makes, and for how many programs, `most` if there are so many items.

    Items are of a block of queries and those heads of a key/value head that go together.
    """
    runs, table = derived_on(structure, device, find_blocks, Blocking("queries", warps.rows, warps.part))
    parts = warps.sharing // warps.together
    blocks, heads = len(table), len(windows) * parts
    count = blocks * heads
    programs = min(most, count)
    # in each turn a program is given one item at most, of half a row
    turns = -(-count // max(programs // 2, 1)) + 2
    cost = runs.new_empty((heads, blocks))
    constants: dict[str, Any] = {
        "CAUSAL": structure.causal, "ROWS": warps.rows, "PART": warps.part, "PIECES": warps.pieces, "LINE": _LINE,
    }  # fmt: skip
    arguments = runs, table, window_table(windows, device), cost, blocks, parts
    cost_items((-(-blocks // _LINE), heads), arguments, constants, ())
    cost, order = cost.flatten().sort(descending=True, stable=True)
    items = runs.new_empty((turns * programs, 3))
    constants = {"LANES": max(16, 1 << (programs - 1).bit_length()), "num_warps": 8}
    deal_items((1,), (table, order, cost, items, blocks, count, programs), constants, ())
    return runs, items, programs
