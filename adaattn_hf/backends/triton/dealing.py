"""Load balancing of a persistent kernel: longest-processing-time assignment of items to programs, on the device."""

from __future__ import annotations

import triton
import triton.language as tl


# lengths must not be compiled in: each new one would wait for the compiler
@triton.jit(do_not_specialize=["blocks", "parts"])
def costs(  # type: ignore[no-untyped-def]
    runs_ptr, run_ptr, first_ptr, rules_ptr, cost_ptr, blocks, parts, CAUSAL: tl.constexpr, ROWS: tl.constexpr,
    PART: tl.constexpr, PIECES: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """Tiles that items `[heads, blocks]` take, `parts` of a key/value head; programs are (LINE blocks, heads).

    One tile is added for how an item begins and ends, and one for its sinks and the edge of its window: about what both
    take on an H200.
    """
    heads = tl.program_id(1)
    block = tl.program_id(0) * LINE + tl.arange(0, LINE)
    there = block < blocks
    run = runs_ptr + 6 * tl.load(run_ptr + block, mask=there, other=0)
    first = tl.load(first_ptr + block, mask=there, other=0)
    q_len = tl.load(run + 2, mask=there, other=0)
    k_len = tl.load(run + 4, mask=there, other=0)
    offset = tl.load(run + 5, mask=there, other=0)
    window = tl.load(rules_ptr + 2 * (heads // parts))
    sinks = tl.load(rules_ptr + 2 * (heads // parts) + 1)
    start = tl.maximum(first + offset - window + 1, 0) // PART * PART
    stop = tl.minimum(first + ROWS, q_len) + offset
    if not CAUSAL:
        stop += window - 1
    read = tl.maximum(tl.minimum(stop, k_len) - start, 0) + tl.minimum(sinks, start)
    cost = tl.cdiv(read, PART * PIECES) + 1 + (first + offset >= window).to(tl.int32)
    tl.store(cost_ptr + heads * blocks + block, cost.to(tl.int32), mask=there)


@triton.jit(do_not_specialize=["blocks", "count", "programs"])
def deal(  # type: ignore[no-untyped-def]
    run_ptr, first_ptr, order_ptr, cost_ptr, items_ptr, blocks, count, programs, LANES: tl.constexpr
):
    """Deals items out, the longest first, half as many at a time as there are programs, to those that have least to do.

    `order` and `cost` hold the items' numbers and costs, sorted. The table `[turns, programs, 3]` begins with a row of
    how many items each program has; then come run, first row and heads of each; behind the last one the heads are -1.
    """
    program = tl.arange(0, LANES)
    there = program < programs
    load = tl.where(there, 0, 1 << 30)
    mine = tl.zeros([LANES], tl.int32)
    step = tl.maximum(programs // 2, 1)
    for begin in range(0, count, step):
        less = load[None, :] < load[:, None]
        less = less | ((load[None, :] == load[:, None]) & (program[None, :] < program[:, None]))
        rank = tl.sum(less.to(tl.int32), 1)
        given = there & (rank < step) & (begin + rank < count)
        number = tl.load(order_ptr + begin + rank, mask=given, other=0)
        load += tl.load(cost_ptr + begin + rank, mask=given, other=0)
        block = number % blocks
        item = items_ptr + 3 * ((mine + 1) * programs + program)
        tl.store(item, tl.load(run_ptr + block, mask=given, other=0).to(tl.int32), mask=given)
        tl.store(item + 1, tl.load(first_ptr + block, mask=given, other=0).to(tl.int32), mask=given)
        tl.store(item + 2, (number // blocks).to(tl.int32), mask=given)
        mine += given.to(tl.int32)
    tl.store(items_ptr + 3 * program, mine, mask=there)
    item = items_ptr + 3 * ((mine + 1) * programs + program)
    tl.store(item, 0, mask=there)
    tl.store(item + 1, 0, mask=there)
    tl.store(item + 2, -1, mask=there)
