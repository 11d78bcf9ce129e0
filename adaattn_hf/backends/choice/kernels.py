"""Triton kernels: mean keys of blocks, the blocks that each row keeps, and their lists per tile of rows.

A row keeps the fewest blocks that hold a share of its pooled attention (`attention.blocks.keep_blocks`). The threshold is
found by bisection instead of a sort: where two weights differ by less than a hundredth a row may keep a block more than
needed, never one less.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x):  # type: ignore[no-untyped-def]
    """tanh by one exponential; exact at both ends."""
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


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
    base = k_ptr + row * k_b + kv_head.to(tl.int64) * k_h + (k_start + j).to(tl.int64)[:, None] * k_n
    there = (j < k_len)[:, None] & (d < DIM)[None, :]
    keys = tl.load(base + d[None, :] * k_d, mask=there, other=0.0).to(tl.float32)
    mean = tl.sum(keys, 0) / tl.maximum(tl.minimum(k_len - block * BLOCK, BLOCK), 1)
    high = mean.to(pooled_ptr.dtype.element_ty)
    pairs = tl.num_programs(1) * tl.num_programs(2)
    place = ((run * tl.num_programs(1) + kv_head).to(tl.int64) * blocks + block) * PAD + d
    tl.store(pooled_ptr + place, high)
    tl.store(
        pooled_ptr + pairs.to(tl.int64) * blocks * PAD + place, (mean - high.to(tl.float32)).to(high.dtype)
    )


@triton.jit(do_not_specialize=["blocks", "q_rows"])
def choose(  # type: ignore[no-untyped-def]
    q_ptr, pooled_ptr, bits_ptr, runs_ptr, masses_ptr, q_b, q_h, q_n, q_d, blocks, batch, q_rows, words, scaling, softcap,
    GROUPS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, PART: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_CAP: tl.constexpr, ROWS: tl.constexpr, LEAST: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """Bitmap of the blocks that ROWS rows keep for a key/value head; programs are (rows, key/value head, run).

    A program works where its rows look back at more than LEAST blocks and at no more than WIDTH, for which it has
    registers. `masses` is float32 `[kv_heads, 2]`: a head's share of mass (0 keeps all) and its sinks. PART columns of
    queries and means are multiplied at a time; where they are all, the means stay for every query head. `bits` is int32
    `[kv_heads, batch, q_rows, words]`; what lies behind a row's own block is not written, and for causality to hide.
    """
    kv_head, run = tl.program_id(1), tl.program_id(2)
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    q_len = tl.load(runs_ptr + 6 * run + 2)
    k_len = tl.load(runs_ptr + 6 * run + 4)
    offset = tl.load(runs_ptr + 6 * run + 5)
    count = tl.cdiv(k_len, BLOCK)
    needed = count
    if CAUSAL:
        last = tl.minimum(first + ROWS, q_len) - 1 + offset
        needed = tl.minimum(count, tl.maximum(last, 0) // BLOCK + 1)
    if (first >= q_len) | (needed <= LEAST) | (needed > WIDTH):
        return
    mass = tl.load(masses_ptr + 2 * kv_head)
    sinks = tl.load(masses_ptr + 2 * kv_head + 1).to(tl.int32)
    row = tl.load(runs_ptr + 6 * run).to(tl.int64)
    q_start = tl.load(runs_ptr + 6 * run + 1)
    b = tl.arange(0, WIDTH)
    w = tl.arange(0, WIDTH // 32)
    i = first + tl.arange(0, ROWS)
    own = (i + offset) // BLOCK
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
        kv_heads, runs = tl.num_programs(1), tl.num_programs(2)
        second = (runs * kv_heads).to(tl.int64) * blocks * PAD
        d = tl.arange(0, PART)
        means = (
            pooled_ptr
            + (run * kv_heads + kv_head).to(tl.int64) * blocks * PAD
            + b[None, :] * PAD
            + d[:, None]
        )
        inside = (b < blocks)[None, :]
        high, low = 0.0, 0.0
        if PART == PAD:
            high = tl.load(means, mask=inside, other=0.0)
            low = tl.load(means + second, mask=inside, other=0.0)
        for member in range(0, GROUPS):
            q_base = (
                q_ptr
                + row * q_b
                + (kv_head * GROUPS + member).to(tl.int64) * q_h
                + q_start.to(tl.int64) * q_n
            )
            q_rows_at = q_base + i.to(tl.int64)[:, None] * q_n
            if PART == PAD:
                q = tl.load(
                    q_rows_at + d[None, :] * q_d, mask=(i < q_len)[:, None] & (d < DIM)[None, :], other=0.0
                )
                s = tl.dot(q, high, input_precision="ieee")
                s = tl.dot(q, low, s, input_precision="ieee")
            else:
                s = tl.zeros([ROWS, WIDTH], tl.float32)
                for part in range(0, PAD, PART):
                    at = part + d
                    q = tl.load(
                        q_rows_at + at[None, :] * q_d,
                        mask=(i < q_len)[:, None] & (at < DIM)[None, :],
                        other=0.0,
                    )
                    more = tl.load(means + part, mask=inside, other=0.0)
                    rest = tl.load(means + second + part, mask=inside, other=0.0)
                    s = tl.dot(q, more, s, input_precision="ieee")
                    s = tl.dot(q, rest, s, input_precision="ieee")
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
                # a flag times a weight, onto the sum: two instructions
                flags = tl.where(e >= tl.exp2(middle)[:, None], 1.0, 0.0)
                enough = tl.sum(flags * e, 1) >= goal
                least = tl.where(enough, middle, least)
                most = tl.where(enough, most, middle)
            kept = kept | _words(e >= tl.exp2(least)[:, None], ROWS, WIDTH)
        tl.store(rows + w[None, :], kept, mask=there)


@triton.jit
def _words(flags, ROWS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Packs booleans `[ROWS, WIDTH]` into the bits of int32 `[ROWS, WIDTH / 32]`."""
    bits = tl.reshape(flags.to(tl.int8), [ROWS, WIDTH // 32, 32])  # threads exchange bytes
    return tl.sum(bits.to(tl.int32) << tl.arange(0, 32)[None, None, :], 2)


@triton.jit
def _or(a, b):  # type: ignore[no-untyped-def]
    return a | b


@triton.jit
def _and(a, b):  # type: ignore[no-untyped-def]
    return a & b


@triton.jit
def append(  # type: ignore[no-untyped-def]
    flags, numbers, taken, lists_ptr, first, step, length, COPIES: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Writes the flagged of consecutive numbers behind those that a list has `taken`; returns how many it has then.

    Lists are rows of `length`, written from the row `first` on to COPIES rows, each `step` behind the one before. With
    REST the numbers below `length` that are not flagged fill a list up from its end, so that none of it is left unset.
    """
    behind = taken + tl.cumsum(flags.to(tl.int32), 0)
    place, there = behind - 1, flags
    if REST:
        place = tl.where(flags, place, length - 1 - (numbers - behind))
        there = numbers < length
    for copy in range(0, COPIES):
        tl.store(lists_ptr + (first + copy * step).to(tl.int64) * length + place, numbers, mask=there)
    return taken + tl.sum(flags.to(tl.int32), 0)


@triton.jit(do_not_specialize=["q_rows", "blocks", "tiles"])
def listing(  # type: ignore[no-untyped-def]
    bits_ptr, some_ptr, some_n_ptr, every_ptr, every_n_ptr, runs_ptr, work_ptr, rules_ptr, batch, q_rows, words, blocks, tiles,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, COPIES: tl.constexpr, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The blocks that a tile of BLOCK_M rows reads; programs are entries of a work table (run, first row, head).

    `every` lists those that every row sees whole, `some` the others: int32 `[entries / tiles, COPIES, tiles, blocks]`, their
    counts the same without `blocks`.
    """
    entry = tl.program_id(0)
    run = tl.load(work_ptr + 3 * entry)
    first = tl.load(work_ptr + 3 * entry + 1)
    kv_head = tl.load(work_ptr + 3 * entry + 2)
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
    some = some & (every == 0)
    first_list = entry // tiles * COPIES * tiles + entry % tiles
    some_n = append(some, b, 0, some_ptr, first_list, tiles, blocks, COPIES, False)
    every_n = append(every, b, 0, every_ptr, first_list, tiles, blocks, COPIES, False)
    for copy in range(0, COPIES):
        tl.store(some_n_ptr + first_list + copy * tiles, some_n)
        tl.store(every_n_ptr + first_list + copy * tiles, every_n)
