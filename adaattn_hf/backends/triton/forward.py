"""Attention of a block of queries over the keys that their head reads, with a window and sinks per key/value head."""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import capped, entry_of, keys_of, rows_of, step, visible


@triton.jit
def forward(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, k_bulk, v_bulk, out_ptr, lse_ptr, sink_ptr, segments_ptr, work_ptr, rules_ptr,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, o_b, o_n, o_h, o_d, l_b, l_h,
    scale, softcap,
    GROUPS: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, PAD: tl.constexpr, PAD_V: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINK: tl.constexpr, HAS_LSE: tl.constexpr,
    BULK: tl.constexpr, EDGES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head; programs are entries of the work table, each for all query heads of its group.

    An entry is (segment, first query, key/value head); `rules` holds each key/value head's window and sinks. With BULK
    TMA brings the tiles that all queries of a block see, and with EDGES the others, too, whose keys then end with a tile
    or with the tensor: `k_bulk` and `v_bulk` are descriptors of the keys and values.
    """
    row_, q_start, q_len, k_start, k_len, offset, first, kv_head, window, sinks = entry_of(
        work_ptr, segments_ptr, rules_ptr, tl.program_id(0) // GROUPS, WINDOW
    )
    head = (kv_head * GROUPS + tl.program_id(0) % GROUPS).to(tl.int64)
    row = row_.to(tl.int64)

    i = first + tl.arange(0, BLOCK_M)
    p = i + offset
    d = tl.arange(0, PAD)
    dv = tl.arange(0, PAD_V)
    q_base = q_ptr + row * q_b + head * q_h + q_start.to(tl.int64) * q_n
    q = rows_of(q_base, i, d, q_n, q_d, q_len, DIM, PAD, False)
    k_base = k_ptr + row * k_b + kv_head.to(tl.int64) * k_h + k_start.to(tl.int64) * k_n
    v_base = v_ptr + row * v_b + kv_head.to(tl.int64) * v_h + k_start.to(tl.int64) * v_n

    start, stop, all_start, all_stop = keys_of(
        first + offset, tl.minimum(first + BLOCK_M, q_len) - 1 + offset, k_len, window, sinks, BLOCK_N, CAUSAL, WINDOW
    )  # fmt: skip

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINK:
        m = tl.full([BLOCK_M], 0.0, tl.float32) + tl.load(sink_ptr + head).to(tl.float32) * 1.4426950408889634
        l += 1.0
    acc = tl.zeros([BLOCK_M, PAD_V], tl.float32)

    # tiles by the rule: those of the sinks before the window's first tile, then both edges of the window
    of_sinks, of_left = 0, 0
    if WINDOW:
        of_sinks = tl.cdiv(tl.minimum(sinks, start), BLOCK_N)
        of_left = tl.cdiv(tl.maximum(tl.minimum(all_start, stop) - start, 0), BLOCK_N)
    of_right = tl.cdiv(tl.maximum(stop - all_stop, 0), BLOCK_N)
    for tile in range(0, of_sinks + of_left + of_right):
        n = all_stop + (tile - of_sinks - of_left) * BLOCK_N
        limit = k_len
        if WINDOW:
            n = tl.where(tile < of_sinks + of_left, start + (tile - of_sinks) * BLOCK_N, n)
            n = tl.where(tile < of_sinks, tile * BLOCK_N, n)
            limit = tl.where(tile < of_sinks, tl.minimum(sinks, start), k_len)
        j = n + tl.arange(0, BLOCK_N)
        if EDGES:
            k = k_bulk.load([row_, kv_head, k_start + n, 0]).reshape(BLOCK_N, PAD).T
            v = v_bulk.load([row_, kv_head, k_start + n, 0]).reshape(BLOCK_N, PAD_V)
        else:
            k = rows_of(k_base, j, d, k_n, k_d, limit, DIM, PAD, False, TURNED=True)
            v = rows_of(v_base, j, dv, v_n, v_d, limit, DIM_V, PAD_V, False)
        seen = visible(p, j, limit, window, sinks, CAUSAL, WINDOW)
        s = tl.dot(q, k, input_precision="ieee")
        if HAS_CAP:
            s = capped(s * scale, softcap, HAS_CAP)
        s = tl.where(seen, s, float("-inf"))
        acc, m, l = step(acc, m, l, s, v, scale, SCALE=not HAS_CAP, HIDDEN=True)
    for n in range(all_start, all_stop, BLOCK_N):
        j = n + tl.arange(0, BLOCK_N)
        if BULK:
            k = k_bulk.load([row_, kv_head, k_start + n, 0]).reshape(BLOCK_N, PAD).T
            v = v_bulk.load([row_, kv_head, k_start + n, 0]).reshape(BLOCK_N, PAD_V)
        else:
            k = rows_of(k_base, j, d, k_n, k_d, k_len, DIM, PAD, True, TURNED=True)
            v = rows_of(v_base, j, dv, v_n, v_d, k_len, DIM_V, PAD_V, True)
        s = tl.dot(q, k, input_precision="ieee")
        if HAS_CAP:
            s = capped(s * scale, softcap, HAS_CAP)
        acc, m, l = step(acc, m, l, s, v, scale, SCALE=not HAS_CAP, HIDDEN=False)

    acc = acc / tl.where(l == 0, 1.0, l)[:, None]
    o_rows = out_ptr + row * o_b + head * o_h + (q_start + i).to(tl.int64)[:, None] * o_n
    tl.store(
        o_rows + dv[None, :] * o_d, acc.to(out_ptr.dtype.element_ty), mask=(i < q_len)[:, None] & (dv < DIM_V)[None, :]
    )
    if HAS_LSE:
        lse = (m + tl.log2(tl.where(l == 0, 1.0, l))) * 0.6931471805599453
        tl.store(lse_ptr + row * l_b + head * l_h + q_start + i, lse, mask=i < q_len)
