"""Attention over kept blocks of keys: the walk of a tile of rows over its lists of blocks."""

from __future__ import annotations

import triton
import triton.language as tl

from .steps import columns_of, rows_of, scores, step, step_of_all, step_of_some, visible


@triton.jit(do_not_specialize=["q_rows", "blocks"])
def over_lists(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, k_bulk, v_bulk, out_ptr, lse_ptr, sink_ptr, bits_ptr, some_ptr, some_n_ptr, every_ptr, every_n_ptr, runs_ptr,
    work_ptr, rules_ptr, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, o_b, o_n, o_h, o_d, l_b, l_h,
    batch, q_rows, words, blocks, scale, softcap,
    GROUPS: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, PAD: tl.constexpr, PAD_V: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINK: tl.constexpr, HAS_LSE: tl.constexpr,
    BULK: tl.constexpr, EDGES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """One tile of rows of one head over the blocks of its lists, PIECES tiles of keys each; all as in `forward`.

    `bits` is int8 here. What the next tile is, and which rows keep it, is asked for a tile ahead: it is too small for the
    pipeline of copies, which would wait for it in every tile.
    """
    tile = tl.program_id(1)
    entry = work_ptr + 3 * tile
    run = tl.load(entry)
    first = tl.load(entry + 1)
    kv_head = tl.load(entry + 2)
    head = (kv_head * GROUPS + tl.program_id(0)).to(tl.int64)
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
    k_base = k_ptr + row * k_b + kv_head.to(tl.int64) * k_h + k_start.to(tl.int64) * k_n
    v_base = v_ptr + row * v_b + kv_head.to(tl.int64) * v_h + k_start.to(tl.int64) * v_n
    bits = bits_ptr + ((kv_head.to(tl.int64) * batch + row) * q_rows + q_start + i) * (4 * words)
    some, every = some_ptr + tile.to(tl.int64) * blocks, every_ptr + tile.to(tl.int64) * blocks
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINK:
        m = tl.full([BLOCK_M], 0.0, tl.float32) + tl.load(sink_ptr + head).to(tl.float32) * 1.4426950408889634
        l += 1.0
    acc = tl.zeros([BLOCK_M, PAD_V], tl.float32)
    tiles = tl.load(some_n_ptr + tile) * PIECES
    block = tl.load(some, mask=tiles > 0, other=0)
    kept = tl.load(bits + block // 8, mask=i < q_len, other=0)
    last = tl.zeros([BLOCK_M], tl.int32) + k_len - 1
    if CAUSAL:
        last = tl.minimum(last, p)
    for t in range(0, tiles):
        following = tl.load(some + (t + 1) // PIECES, mask=t + 1 < tiles, other=0)
        n = (block * PIECES + t % PIECES) * BLOCK_N
        j = n + tl.arange(0, BLOCK_N)
        if EDGES:
            k = k_bulk.load([row_, kv_head, k_start + n, 0]).reshape(BLOCK_N, PAD).T
            v = v_bulk.load([row_, kv_head, k_start + n, 0]).reshape(BLOCK_N, PAD_V)
        else:
            k = columns_of(k_base, j, d, k_n, k_d, k_len, DIM, PAD, False)
            v = rows_of(v_base, j, dv, v_n, v_d, k_len, DIM_V, PAD_V, False)
        # a row sees the tile up to its own place and to the last key, or nothing of it
        reach = tl.where(((kept >> (block % 8)) & 1) != 0, last, -1)
        seen = j[None, :] <= reach[:, None]
        if WINDOW:
            seen = seen & visible(p, j, k_len, window, sinks, CAUSAL, WINDOW)
        if HAS_CAP:
            s = tl.where(seen, scores(q, k, scale, softcap, HAS_CAP), float("-inf"))
            acc, m, l = step(acc, m, l, s, v)
        else:
            s = tl.where(seen, tl.dot(q, k, input_precision="ieee"), float("-inf"))
            acc, m, l = step_of_some(acc, m, l, s, v, scale)
        block = following
        kept = tl.load(bits + block // 8, mask=i < q_len, other=0)
    tiles = tl.load(every_n_ptr + tile) * PIECES
    block = tl.load(every, mask=tiles > 0, other=0)
    for t in range(0, tiles):
        n = (block * PIECES + t % PIECES) * BLOCK_N
        block = tl.load(every + (t + 1) // PIECES, mask=t + 1 < tiles, other=0)
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
