"""Kernels that make work tables: runs are cut into blocks, blocks put in order of their work, items dealt out."""

from __future__ import annotations

import triton
import triton.language as tl


# lengths must not be compiled in: each new one would wait for the compiler
@triton.jit(do_not_specialize=["q_start", "q_len", "k_start", "k_len", "offset"])
def repeat(runs_ptr, q_start, q_len, k_start, k_len, offset):  # type: ignore[no-untyped-def]
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


@triton.jit(do_not_specialize=["runs"])
def cut(  # type: ignore[no-untyped-def]
    runs_ptr, blocks_ptr, runs, OF_QUERIES: tl.constexpr, CAUSAL: tl.constexpr, BLOCK: tl.constexpr,
    CLASSES: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """Writes run, first row and class of work of each block, int32 `[blocks, 3]`; programs are runs."""
    own = tl.program_id(0)
    before = tl.zeros([LINE], tl.int32)
    most = tl.zeros([LINE], tl.int32)
    for begin in range(0, runs, LINE):
        run = begin + tl.arange(0, LINE)
        there = run < runs
        q_len = tl.load(runs_ptr + 6 * run + 2, mask=there, other=0)
        k_len = tl.load(runs_ptr + 6 * run + 4, mask=there, other=0)
        offset = tl.load(runs_ptr + 6 * run + 5, mask=there, other=0)
        if OF_QUERIES:
            blocks = tl.cdiv(q_len, BLOCK)
            heaviest = (blocks - 1) * BLOCK
        else:
            blocks = tl.cdiv(k_len, BLOCK)
            heaviest = tl.zeros_like(blocks)
        work = _work(q_len, k_len, offset, heaviest, OF_QUERIES, CAUSAL, BLOCK)
        before += tl.where(run < own, blocks, 0)
        most = tl.maximum(most, tl.where(blocks > 0, work, 0))
    start = blocks_ptr + 3 * tl.sum(before, 0)
    limit = tl.max(most, 0) + 1
    q_len = tl.load(runs_ptr + 6 * own + 2)
    k_len = tl.load(runs_ptr + 6 * own + 4)
    offset = tl.load(runs_ptr + 6 * own + 5)
    rows = q_len if OF_QUERIES else k_len
    for begin in range(0, tl.cdiv(rows, BLOCK), LINE):
        block = begin + tl.arange(0, LINE)
        first = block * BLOCK
        there = first < rows
        work = _work(q_len, k_len, offset, first, OF_QUERIES, CAUSAL, BLOCK)
        tl.store(start + 3 * block, own, mask=there)
        tl.store(start + 3 * block + 1, first, mask=there)
        tl.store(start + 3 * block + 2, (work.to(tl.int64) * CLASSES // limit).to(tl.int32), mask=there)


@triton.jit(do_not_specialize=["count", "kv_heads"])
def order(blocks_ptr, entries_ptr, count, kv_heads, LAST_FIRST: tl.constexpr, LINE: tl.constexpr):  # type: ignore[no-untyped-def] # fmt: skip
    """Writes run, first row and key/value head of all blocks and heads, those with most to do first.

    Those of a class are ordered by head, then as they come, with LAST_FIRST from the end; programs are LINE blocks.
    """
    own = tl.program_id(0) * LINE + tl.arange(0, LINE)
    there = own < count
    level = tl.load(blocks_ptr + 3 * own + 2, mask=there, other=0)
    more = tl.zeros([LINE], tl.int32)
    same = tl.zeros([LINE], tl.int32)
    before = tl.zeros([LINE], tl.int32)
    for begin in range(0, count, LINE):
        other = begin + tl.arange(0, LINE)
        theirs = tl.load(blocks_ptr + 3 * other + 2, mask=other < count, other=-1)
        equal = theirs[None, :] == level[:, None]
        earlier = other[None, :] > own[:, None] if LAST_FIRST else other[None, :] < own[:, None]
        more += tl.sum((theirs[None, :] > level[:, None]).to(tl.int32), 1)
        same += tl.sum(equal.to(tl.int32), 1)
        before += tl.sum((equal & earlier).to(tl.int32), 1)
    run = tl.load(blocks_ptr + 3 * own, mask=there, other=0)
    first = tl.load(blocks_ptr + 3 * own + 1, mask=there, other=0)
    for head in range(0, kv_heads):
        entry = entries_ptr + 3 * (more * kv_heads + head * same + before)
        tl.store(entry, run, mask=there)
        tl.store(entry + 1, first, mask=there)
        tl.store(entry + 2, head, mask=there)


@triton.jit(do_not_specialize=["blocks", "parts"])
def costs(  # type: ignore[no-untyped-def]
    runs_ptr, blocks_ptr, rules_ptr, cost_ptr, blocks, parts, CAUSAL: tl.constexpr, ROWS: tl.constexpr,
    PART: tl.constexpr, PIECES: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """Tiles that items `[heads, blocks]` take, `parts` of a key/value head; programs are (LINE blocks, heads).

    One tile is added for how an item begins and ends, and one for its sinks and the edge of its window: about what both
    take on an H200.
    """
    heads = tl.program_id(1)
    block = tl.program_id(0) * LINE + tl.arange(0, LINE)
    there = block < blocks
    run = runs_ptr + 6 * tl.load(blocks_ptr + 3 * block, mask=there, other=0)
    first = tl.load(blocks_ptr + 3 * block + 1, mask=there, other=0)
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
def deal(blocks_ptr, order_ptr, cost_ptr, items_ptr, blocks, count, programs, LANES: tl.constexpr):  # type: ignore[no-untyped-def] # fmt: skip
    """Deals items out, the longest first, half as many at a time as there are programs, to those that have least to do.

    `order` and `cost` hold the items' numbers and costs, sorted. The table `[turns, programs, 3]` begins with a row of
    how many items each program has; then come run, first row and heads of each; after the last one the heads are -1.
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
        block = blocks_ptr + 3 * (number % blocks)
        item = items_ptr + 3 * ((mine + 1) * programs + program)
        tl.store(item, tl.load(block, mask=given, other=0), mask=given)
        tl.store(item + 1, tl.load(block + 1, mask=given, other=0), mask=given)
        tl.store(item + 2, (number // blocks).to(tl.int32), mask=given)
        mine += given.to(tl.int32)
    tl.store(items_ptr + 3 * program, mine, mask=there)
    item = items_ptr + 3 * ((mine + 1) * programs + program)
    tl.store(item, 0, mask=there)
    tl.store(item + 1, 0, mask=there)
    tl.store(item + 2, -1, mask=there)
