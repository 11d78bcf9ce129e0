"""Lists, on the device and by one launch, the blocks that each block of queries or of keys meets under windows per head.

flash-attn 4 reads them. Imported with the first such call, as it needs Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...attention.heads import HeadWindows
from ...attention.structure import MaskStructure
from ..base import derived_on

BLOCK = 128
"""Queries and keys per block."""
_CHUNK = 128
"""Blocks that a program looks at together."""


@triton.jit
def append(  # type: ignore[no-untyped-def]
    flags, numbers, taken, lists_ptr, first, step, length, COPIES: tl.constexpr,
):  # fmt: skip
    """Writes the flagged of consecutive numbers behind those that a list has `taken`; returns how many it has then.

    Lists are rows of `length`, written from the row `first` on to COPIES rows, each `step` behind the one before. The
    numbers below `length` that are not flagged fill a list up from its end, so that none of it is left unset.
    """
    behind = taken + tl.cumsum(flags.to(tl.int32), 0)
    place = tl.where(flags, behind - 1, length - 1 - (numbers - behind))
    for copy in range(0, COPIES):
        tl.store(lists_ptr + (first + copy * step).to(tl.int64) * length + place, numbers, mask=numbers < length)
    return taken + tl.sum(flags.to(tl.int32), 0)


@triton.jit
def _seen(  # type: ignore[no-untyped-def]
    first_low, first_high, stop_low, stop_high, low, high, start, kv_len, window, sinks, CAUSAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Whether queries within bounds see a block of keys from `start` in part, and whether they see it whole."""
    end = tl.minimum(start + BLOCK, kv_len) - 1
    some = (end >= first_low) & (start < stop_high)
    every = (start >= first_high) & (end < stop_low) & (start + BLOCK <= kv_len)
    near, all_near = low - end < window, high - start < window
    if CAUSAL:
        some = some & (start <= high)
        every = every & (end <= low)
    else:
        near = near & (start - high < window)
        all_near = all_near & (end - low < window)
    some = some & (near | (start - first_high < sinks))
    every = every & some & (all_near | (end - first_low < sinks))
    return some & (every == 0), every


@triton.jit(do_not_specialize=["q_len", "kv_len", "offset"])
def listing(  # type: ignore[no-untyped-def]
    runs_ptr, bounds_ptr, windows_ptr, some_n_ptr, some_ptr, every_n_ptr, every_ptr, q_len, kv_len, offset,
    PLAIN: tl.constexpr, TURNED: tl.constexpr, CAUSAL: tl.constexpr, COPIES: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Lists of blocks of keys for blocks of queries, or TURNED; programs are (own block, key/value head, batch row).

    Bounds are the least and the greatest first key, stop key and place of a block's queries: from `runs`, int32
    `[3, batch, q_len]`, or from numbers where calls are PLAIN. They stand for all of its rows, and are left in `bounds`,
    int32 `[6, batch, blocks of queries]`, where a TURNED launch finds them. `windows` is int32 `[2, query heads]`; each
    list is written for COPIES query heads. What a list does not take fills it up from its end.
    """
    own, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads, owns, batch = tl.num_programs(1) * COPIES, tl.num_programs(0), tl.num_programs(2)
    window = tl.load(windows_ptr + kv_head * COPIES)
    sinks = tl.load(windows_ptr + heads + kv_head * COPIES)
    first_list = (row * heads + kv_head * COPIES) * owns + own
    part = tl.arange(0, CHUNK)
    if TURNED:
        others = tl.cdiv(q_len, BLOCK)
        start = own * BLOCK
        of_row, step = bounds_ptr + row * others, batch * others
    else:
        others = tl.cdiv(kv_len, BLOCK)
        if PLAIN:
            first_low, first_high, stop_low, stop_high = 0, 0, kv_len, kv_len
            low = own * BLOCK + offset
            high = tl.minimum(own * BLOCK + BLOCK, q_len) - 1 + offset
        else:
            # a last, short block is filled with its last row
            i = tl.minimum(own * BLOCK + tl.arange(0, BLOCK), q_len - 1)
            at = runs_ptr + row.to(tl.int64) * q_len + i
            along = batch.to(tl.int64) * q_len
            first, stop, place = tl.load(at), tl.load(at + along), tl.load(at + 2 * along)
            first_low, first_high = tl.min(first, 0), tl.max(first, 0)
            stop_low, stop_high = tl.min(stop, 0), tl.max(stop, 0)
            low, high = tl.min(place, 0), tl.max(place, 0)
        if kv_head == 0:
            left, step = bounds_ptr + row * owns + own, batch * owns
            tl.store(left, first_low)
            tl.store(left + step, first_high)
            tl.store(left + 2 * step, stop_low)
            tl.store(left + 3 * step, stop_high)
            tl.store(left + 4 * step, low)
            tl.store(left + 5 * step, high)
    some_n, every_n = 0, 0
    for begin in range(0, others, CHUNK):
        other = begin + part
        inside = other < others
        if TURNED:
            found = of_row + other
            first_low = tl.load(found, mask=inside, other=0)
            first_high = tl.load(found + step, mask=inside, other=0)
            stop_low = tl.load(found + 2 * step, mask=inside, other=0)
            stop_high = tl.load(found + 3 * step, mask=inside, other=0)
            low = tl.load(found + 4 * step, mask=inside, other=0)
            high = tl.load(found + 5 * step, mask=inside, other=0)
        else:
            start = other * BLOCK
        some, every = _seen(
            first_low, first_high, stop_low, stop_high, low, high, start, kv_len, window, sinks, CAUSAL, BLOCK
        )
        some_n = append(some & inside, other, some_n, some_ptr, first_list, owns, others, COPIES)
        every_n = append(every & inside, other, every_n, every_ptr, first_list, owns, others, COPIES)
    for copy in range(0, COPIES):
        tl.store(some_n_ptr + first_list + copy * owns, some_n)
        tl.store(every_n_ptr + first_list + copy * owns, every_n)


Lists = tuple[Tensor, Tensor, Tensor, Tensor]
"""Counts and ascending indices of the blocks that need the mask, then of those that are seen whole, int32."""


def make_lists(
    structure: MaskStructure, device: torch.device, windows: HeadWindows, groups: int, kv_len: int, plain: bool
) -> tuple[Lists, list[Tensor], Tensor]:
    """The blocks that queries see under the windows and sinks of their heads, the tables of a mask for borders, bounds.

    By one launch: of `kv_len` keys, of which each query sees all if `plain`; `groups` query heads share each. Plain
    causal calls have the last query at the last key, others the first at the first.

    * Lists: for every block of queries the blocks of keys; counts `[batch, heads, blocks of queries]`, indices `[...,
      blocks of keys]`, whose rest behind the count holds the other blocks. Batch 1 without runs.
    * Tables: windows and sinks, int32 `[heads]`; then, of calls of runs, int32 `[batch, q_len]`: the first key of a
      query's run, the one behind its last, the query's place among keys.
    * Bounds, int32 `[6, batch, blocks of queries]`, stand for a block's rows: a block that is said to be seen in part
      may hold nothing, one that is said to be seen whole is.
    """
    by_head = [[rule[i] for rule in windows for _ in range(groups)] for i in range(2)]
    with torch.inference_mode(False):  # a later pass may want gradients
        table = torch.tensor(by_head, dtype=torch.int32, device="cpu").to(device, non_blocking=True)
        runs = None if plain else _runs(structure, device)
        bounds = table.new_empty((6, 1 if runs is None else structure.batch, -(-structure.q_len // BLOCK)))
        lists = _listed(structure, table, bounds, runs, groups, kv_len, turned=False)
    return lists, [*table.unbind(0), *(() if runs is None else runs.unbind(0))], bounds


def turned_lists(
    structure: MaskStructure, device: torch.device, windows: HeadWindows, groups: int, kv_len: int, plain: bool
) -> Lists:
    """For every block of keys the blocks of queries; made when a gradient asks for them."""
    _, tables, bounds = derived_on(structure, device, make_lists, windows, groups, kv_len, plain)
    with torch.inference_mode(False):
        table = torch.stack(tables[:2])
        return _listed(structure, table, bounds, None if plain else table, groups, kv_len, turned=True)


def _listed(
    structure: MaskStructure,
    windows: Tensor,
    bounds: Tensor,
    runs: Tensor | None,
    groups: int,
    kv_len: int,
    turned: bool,
) -> Lists:
    """The lists of either side by one launch, which leaves the bounds of blocks of queries, or finds them if `turned`."""
    own, others, heads = -(-structure.q_len // BLOCK), -(-kv_len // BLOCK), windows.shape[1]
    if turned:
        own, others = others, own
    shape, new = (bounds.shape[1], heads, own), windows.new_empty
    lists = new(shape), new((*shape, others)), new(shape), new((*shape, others))
    listing[(own, heads // groups, bounds.shape[1])](
        windows if runs is None else runs, bounds, windows, *lists, structure.q_len, kv_len,
        kv_len - structure.q_len if structure.causal else 0, PLAIN=runs is None, TURNED=turned,
        CAUSAL=structure.causal, COPIES=groups, BLOCK=BLOCK, CHUNK=_CHUNK, num_warps=1,
    )  # fmt: skip
    return lists


def _runs(structure: MaskStructure, device: torch.device) -> Tensor:
    """Int32 `[3, batch, q_len]`, as the last tables; a query that sees nothing has a run that begins behind all keys."""
    segments = structure.segments()
    if segments is None:
        raise ValueError("structure: a dense mask or padding with holes, expected runs; use the sdpa backend")
    runs = torch.empty((3, structure.batch, structure.q_len), dtype=torch.int32, device="cpu")
    first, stop, place = runs.unbind(0)
    first.fill_(structure.kv_len)
    stop.zero_()
    place.fill_(-1)
    for s in segments:
        rows = slice(s.q_start, s.q_start + s.q_len)
        first[s.row, rows] = s.k_start
        stop[s.row, rows] = s.k_start + s.k_len
        place[s.row, rows] = torch.arange(s.q_len, dtype=torch.int32, device="cpu") + (s.k_start + s.offset)
    return runs.to(device, non_blocking=True)
