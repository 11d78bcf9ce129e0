"""Attention over kept blocks of keys: the blocks that each row keeps, their lists per tile of rows, and the walk over them.

A row keeps the fewest blocks that hold a share of its pooled attention (`attention.blocks.keep_blocks`). The least weight
that is kept is found by bisection instead of a sort: a row may keep one block more than it must where two weights differ
by less than a thousandth, never one less.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .steps import columns_of, rows_of, scores, step, step_of_all, tanh, visible


@triton.jit(do_not_specialize=["blocks"])
def pool(  # type: ignore[no-untyped-def]
    k_ptr, pooled_ptr, runs_ptr, k_b, k_h, k_n, k_d, blocks, DIM: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mean key of a block as a sum of two numbers of the keys' dtype; programs are (block, key/value head, run).

    `pooled` is `[2, runs, kv_heads, blocks, PAD]`.
    """
    block, kv_head, run = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(runs_ptr + 6 * run).to(tl.int64)
    k_start = tl.load(runs_ptr + 6 * run + 3)
    k_len = tl.load(runs_ptr + 6 * run + 4)
    d = tl.arange(0, PAD)
    j = block * BLOCK + tl.arange(0, BLOCK)
    base = k_ptr + row * k_b + kv_head * k_h + k_start.to(tl.int64) * k_n
    keys = rows_of(base, j, d, k_n, k_d, k_len, DIM, PAD, False).to(tl.float32)
    mean = tl.sum(keys, 0) / tl.maximum(tl.minimum(k_len - block * BLOCK, BLOCK), 1)
    high = mean.to(pooled_ptr.dtype.element_ty)
    pairs = tl.num_programs(1) * tl.num_programs(2)
    place = ((run * tl.num_programs(1) + kv_head).to(tl.int64) * blocks + block) * PAD + d
    tl.store(pooled_ptr + place, high)
    tl.store(
        pooled_ptr + pairs.to(tl.int64) * blocks * PAD + place, (mean - high.to(tl.float32)).to(high.dtype)
    )


@triton.jit(do_not_specialize=["runs", "kv_heads", "blocks", "q_rows"])
def choose(  # type: ignore[no-untyped-def]
    q_ptr, pooled_ptr, pooled_bulk, bits_ptr, runs_ptr, work_ptr, masses_ptr, q_b, q_h, q_n, q_d, runs, kv_heads, blocks, batch, q_rows, words,
    scaling, softcap,
    GROUPS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, PART: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_CAP: tl.constexpr, BULK: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Bits of the blocks that ROWS rows keep for a key/value head; programs are entries (run, first row, head).

    `masses` is float32 `[kv_heads, 2]`: a head's share of mass (0 keeps all) and its sinks. WIDTH is at least the number
    of blocks; PART columns of queries and means are multiplied at a time. `bits` is int32 `[kv_heads, batch, q_rows, words]`.
    With BULK the copy engine brings the means, whose addresses would take half of the registers.
    """
    entry = work_ptr + 3 * tl.program_id(0)
    run = tl.load(entry)
    first = tl.load(entry + 1)
    kv_head = tl.load(entry + 2)
    mass = tl.load(masses_ptr + 2 * kv_head)
    sinks = tl.load(masses_ptr + 2 * kv_head + 1).to(tl.int32)
    row = tl.load(runs_ptr + 6 * run).to(tl.int64)
    q_start = tl.load(runs_ptr + 6 * run + 1)
    q_len = tl.load(runs_ptr + 6 * run + 2)
    k_len = tl.load(runs_ptr + 6 * run + 4)
    offset = tl.load(runs_ptr + 6 * run + 5)
    b = tl.arange(0, WIDTH)
    r = tl.arange(0, ROWS)
    w = tl.arange(0, WIDTH // 32)
    i = first + r
    own = (i + offset) // BLOCK
    count = tl.cdiv(k_len, BLOCK)
    rows = bits_ptr + ((kv_head.to(tl.int64) * batch + row) * q_rows + q_start + i)[:, None] * words
    there = (i < q_len)[:, None] & (w < words)[None, :]
    if mass == 0.0:
        tl.store(rows + w[None, :], tl.full([ROWS, WIDTH // 32], -1, tl.int32), mask=there)
    else:
        scored = (b < count)[None, :] & (own >= 0)[:, None]
        forced = (
            (b[None, :] == own[:, None]) | (b[None, :] == own[:, None] - 1) | (b * BLOCK < sinks)[None, :]
        )
        if CAUSAL:
            scored = scored & (b[None, :] < own[:, None])
        else:
            forced = forced | (b[None, :] == own[:, None] + 1)
        kept = _words(forced, ROWS, WIDTH)
        pair = (run * kv_heads + kv_head).to(tl.int64) * blocks * PAD
        second = runs.to(tl.int64) * kv_heads * blocks * PAD
        d = tl.arange(0, PART)
        place, behind = (run * kv_heads + kv_head) * blocks, runs * kv_heads * blocks
        means = pooled_ptr + pair + b[None, :] * PAD + d[:, None]
        inside = (b < blocks)[None, :]
        for member in range(0, GROUPS):
            q_base = q_ptr + row * q_b + (kv_head * GROUPS + member) * q_h + q_start.to(tl.int64) * q_n
            q_rows_at = q_base + i.to(tl.int64)[:, None] * q_n
            s = tl.zeros([ROWS, WIDTH], tl.float32)
            for part in range(0, PAD, PART):
                at = part + d
                q = tl.load(
                    q_rows_at + at[None, :] * q_d, mask=(i < q_len)[:, None] & (at < DIM)[None, :], other=0.0
                )
                if BULK:
                    high = pooled_bulk.load([0, 0, place, part]).reshape(WIDTH, PART).T
                    low = pooled_bulk.load([0, 0, place + behind, part]).reshape(WIDTH, PART).T
                else:
                    high = tl.load(means + part, mask=inside, other=0.0)
                    low = tl.load(means + second + part, mask=inside, other=0.0)
                s = tl.dot(q, high, s, input_precision="ieee")
                s = tl.dot(q, low, s, input_precision="ieee")
            s = s * scaling
            if HAS_CAP:
                s = softcap * tanh(s / softcap)
            if not CAUSAL:
                # the last block may hold fewer keys
                share = (k_len - (count - 1) * BLOCK).to(tl.float32) / BLOCK
                s = s + tl.where(b == count - 1, tl.log(share), 0.0)[None, :]
            s = tl.where(scored, s * 1.4426950408889634, float("-inf"))
            top = tl.max(s, 1)
            e = tl.exp2(s - tl.where(top == float("-inf"), 0.0, top)[:, None])
            whole = tl.sum(e, 1)
            goal = mass * whole
            # blocks of less than this weight hold less than the share that may be left out
            least = tl.log2((1.0 - mass) * tl.maximum(whole, 1.0) / tl.maximum(count, 1)) - 0.01
            most = tl.zeros([ROWS], tl.float32)
            for _ in range(0, STEPS):
                middle = 0.5 * (least + most)
                enough = tl.sum(tl.where(e >= tl.exp2(middle)[:, None], e, 0.0), 1) >= goal
                least = tl.where(enough, middle, least)
                most = tl.where(enough, most, middle)
            kept = kept | _words(e >= tl.exp2(least)[:, None], ROWS, WIDTH)
        tl.store(rows + w[None, :], kept, mask=there)


@triton.jit
def _words(flags, ROWS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Booleans `[ROWS, WIDTH]` as bits of int32 `[ROWS, WIDTH / 32]`."""
    bits = tl.reshape(flags.to(tl.int8), [ROWS, WIDTH // 32, 32])  # threads exchange bytes
    return tl.sum(bits.to(tl.int32) << tl.arange(0, 32)[None, None, :], 2)


@triton.jit
def _or(a, b):  # type: ignore[no-untyped-def]
    return a | b


@triton.jit
def _and(a, b):  # type: ignore[no-untyped-def]
    return a & b


@triton.jit(do_not_specialize=["q_rows"])
def listing(  # type: ignore[no-untyped-def]
    bits_ptr, lists_ptr, counts_ptr, runs_ptr, work_ptr, rules_ptr, batch, q_rows, words,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The blocks that a tile of BLOCK_M rows reads; programs are entries of the attention's work table.

    `lists` is int32 `[entries, WIDTH]`: blocks that every row sees whole from the left, the others from the right;
    `counts` is `[entries, 2]`.
    """
    tile = tl.program_id(0)
    run = tl.load(work_ptr + 3 * tile)
    first = tl.load(work_ptr + 3 * tile + 1)
    kv_head = tl.load(work_ptr + 3 * tile + 2)
    row = tl.load(runs_ptr + 6 * run).to(tl.int64)
    q_start = tl.load(runs_ptr + 6 * run + 1)
    q_len = tl.load(runs_ptr + 6 * run + 2)
    k_len = tl.load(runs_ptr + 6 * run + 4)
    offset = tl.load(runs_ptr + 6 * run + 5)
    i = first + tl.arange(0, BLOCK_M)
    w = tl.arange(0, WIDTH // 32)
    rows = bits_ptr + ((kv_head.to(tl.int64) * batch + row) * q_rows + q_start + i)[:, None] * words
    inside = (i < q_len)[:, None] & (w < words)[None, :]
    bits = tl.load(rows + w[None, :], mask=inside, other=0)
    some = tl.reduce(bits, 0, _or)
    every = tl.reduce(tl.where((i < q_len)[:, None], bits, -1), 0, _and)
    b = tl.arange(0, WIDTH)
    some = tl.reshape((some[:, None] >> tl.arange(0, 32)[None, :]) & 1, [WIDTH]) != 0
    every = tl.reshape((every[:, None] >> tl.arange(0, 32)[None, :]) & 1, [WIDTH]) != 0
    low = first + offset
    high = tl.minimum(first + BLOCK_M, q_len) - 1 + offset
    begin, end = b * BLOCK, (b + 1) * BLOCK - 1
    some = some & (begin < k_len)
    every = every & (end < k_len)
    if CAUSAL:
        some = some & (begin <= high)
        every = every & (end <= low)
    if WINDOW:
        window = tl.load(rules_ptr + 2 * kv_head)
        sinks = tl.load(rules_ptr + 2 * kv_head + 1)
        near, all_near = end > low - window, begin > high - window
        if not CAUSAL:
            near = near & (begin < high + window)
            all_near = all_near & (end < low + window)
        some = some & (near | (begin < sinks))
        every = every & (all_near | (end < sinks))
    every = every & some
    others = some & (every == 0)
    lists = lists_ptr + tile.to(tl.int64) * WIDTH
    tl.store(lists + tl.cumsum(every.to(tl.int32), 0) - 1, b, mask=every)
    tl.store(lists + WIDTH - tl.cumsum(others.to(tl.int32), 0), b, mask=others)
    tl.store(counts_ptr + 2 * tile, tl.sum(every.to(tl.int32), 0))
    tl.store(counts_ptr + 2 * tile + 1, tl.sum(others.to(tl.int32), 0))


@triton.jit(do_not_specialize=["q_rows"])
def over_lists(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, k_bulk, v_bulk, out_ptr, lse_ptr, sink_ptr, bits_ptr, lists_ptr, counts_ptr, runs_ptr, work_ptr,
    rules_ptr, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, o_b, o_n, o_h, o_d, l_b, l_h,
    batch, q_rows, words, width, scale, softcap,
    GROUPS: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, PAD: tl.constexpr, PAD_V: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINK: tl.constexpr, HAS_LSE: tl.constexpr,
    BULK: tl.constexpr, EDGES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """One tile of rows of one head over the blocks of its list, PIECES tiles of keys each; all as in `forward`.

    `bits` is int8 here.
    """
    tile = tl.program_id(1)
    entry = work_ptr + 3 * tile
    run = tl.load(entry)
    first = tl.load(entry + 1)
    kv_head = tl.load(entry + 2)
    head = kv_head * GROUPS + tl.program_id(0)
    row_ = tl.load(runs_ptr + 6 * run)
    row = row_.to(tl.int64)
    q_start = tl.load(runs_ptr + 6 * run + 1)
    q_len = tl.load(runs_ptr + 6 * run + 2)
    k_start = tl.load(runs_ptr + 6 * run + 3)
    k_len = tl.load(runs_ptr + 6 * run + 4)
    offset = tl.load(runs_ptr + 6 * run + 5)
    window, sinks = 0, 0
    if WINDOW:
        window = tl.load(rules_ptr + 2 * kv_head)
        sinks = tl.load(rules_ptr + 2 * kv_head + 1)
    i = first + tl.arange(0, BLOCK_M)
    p = i + offset
    d = tl.arange(0, PAD)
    dv = tl.arange(0, PAD_V)
    q_base = q_ptr + row * q_b + head * q_h + q_start.to(tl.int64) * q_n
    q = rows_of(q_base, i, d, q_n, q_d, q_len, DIM, PAD, False)
    k_base = k_ptr + row * k_b + kv_head * k_h + k_start.to(tl.int64) * k_n
    v_base = v_ptr + row * v_b + kv_head * v_h + k_start.to(tl.int64) * v_n
    bits = bits_ptr + ((kv_head.to(tl.int64) * batch + row) * q_rows + q_start + i) * (4 * words)
    lists = lists_ptr + tile.to(tl.int64) * width
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINK:
        m = tl.full([BLOCK_M], 0.0, tl.float32) + tl.load(sink_ptr + head).to(tl.float32) * 1.4426950408889634
        l += 1.0
    acc = tl.zeros([BLOCK_M, PAD_V], tl.float32)
    for t in range(0, tl.load(counts_ptr + 2 * tile + 1) * PIECES):
        block = tl.load(lists + width - 1 - t // PIECES)
        n = (block * PIECES + t % PIECES) * BLOCK_N
        j = n + tl.arange(0, BLOCK_N)
        if EDGES:
            k = k_bulk.load([row_, kv_head, k_start + n, 0]).reshape(BLOCK_N, PAD).T
            v = v_bulk.load([row_, kv_head, k_start + n, 0]).reshape(BLOCK_N, PAD_V)
        else:
            k = columns_of(k_base, j, d, k_n, k_d, k_len, DIM, PAD, False)
            v = rows_of(v_base, j, dv, v_n, v_d, k_len, DIM_V, PAD_V, False)
        s = scores(q, k, scale, softcap, HAS_CAP)
        kept = (tl.load(bits + block // 8, mask=i < q_len, other=0) >> (block % 8)) & 1
        seen = visible(p, j, k_len, window, sinks, CAUSAL, WINDOW) & (kept != 0)[:, None]
        acc, m, l = step(acc, m, l, tl.where(seen, s, float("-inf")), v)
    for t in range(0, tl.load(counts_ptr + 2 * tile) * PIECES):
        n = (tl.load(lists + t // PIECES) * PIECES + t % PIECES) * BLOCK_N
        j = n + tl.arange(0, BLOCK_N)
        if BULK:
            k = k_bulk.load([row_, kv_head, k_start + n, 0]).reshape(BLOCK_N, PAD).T
            v = v_bulk.load([row_, kv_head, k_start + n, 0]).reshape(BLOCK_N, PAD_V)
        else:
            k = columns_of(k_base, j, d, k_n, k_d, k_len, DIM, PAD, True)
            v = rows_of(v_base, j, dv, v_n, v_d, k_len, DIM_V, PAD_V, True)
        if HAS_CAP:
            acc, m, l = step(acc, m, l, scores(q, k, scale, softcap, HAS_CAP), v)
        else:
            acc, m, l = step_of_all(acc, m, l, tl.dot(q, k, input_precision="ieee"), v, scale)
    acc = acc / tl.where(l == 0, 1.0, l)[:, None]
    o_rows = out_ptr + row * o_b + head * o_h + (q_start + i).to(tl.int64)[:, None] * o_n
    tl.store(
        o_rows + dv[None, :] * o_d,
        acc.to(out_ptr.dtype.element_ty),
        mask=(i < q_len)[:, None] & (dv < DIM_V)[None, :],
    )
    if HAS_LSE:
        lse = (m + tl.log2(tl.where(l == 0, 1.0, l))) * 0.6931471805599453
        tl.store(lse_ptr + row * l_b + head * l_h + q_start + i, lse, mask=i < q_len)
