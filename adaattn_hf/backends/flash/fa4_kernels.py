"""A Triton kernel that lists, for flash-attn 4, the blocks that each block of queries or of keys meets under windows."""

from __future__ import annotations

import triton
import triton.language as tl


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
