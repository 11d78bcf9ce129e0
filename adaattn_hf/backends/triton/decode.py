"""Decode step (one query per sequence): the keys of each head are split among the device's multiprocessors.

FlashDecoding's split-K (Dao, Haziza, Massa and Sizov 2023) over the keys that a head really reads: with a window, the
sinks and the window as one contiguous range. The last program to finish merges the partial results of a head, so that a
step is one launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .shares import finish, reading
from .tiles import capped, step


# lengths grow by one in every step: they must not be compiled in
@triton.jit(do_not_specialize=["kv_len", "offset", "most", "span", "window", "sinks", "until"])
def decode(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, sink_ptr, part_ptr, done_ptr, rows_ptr, offset_ptr, real_ptr, rules_ptr,
    q_b, q_h, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d,
    kv_len, offset, kv_heads, most, span, window, sinks, until, scale, softcap,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, PAD: tl.constexpr,
    PAD_V: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PER_HEAD: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SINK: tl.constexpr, HAS_LSE: tl.constexpr, TABLE: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_REAL: tl.constexpr,
    FIND: tl.constexpr, BLOCK_N: tl.constexpr, HEADS: tl.constexpr, CHUNK: tl.constexpr, SINGLE: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """A share of the keys of one sequence and key/value head, for the one query of all its query heads.

    `shares.reading` says which keys; HAS_REAL leaves out those that `real` (contiguous `[batch, kv_len]`) denies. `out`
    `[batch, heads, DIM_V]`, `lse` `[batch, heads]` and `part` (`shares.finish`) are contiguous.
    """
    kv_head, share, shares, row, first, few, low, start, end = reading(
        rules_ptr, rows_ptr, offset_ptr, real_ptr, kv_len, offset, kv_heads, most, span, window, sinks, until, BLOCK_N,
        CAUSAL, WINDOW, PER_HEAD, TABLE, HAS_OFFSET, FIND, HAS_REAL,
    )  # fmt: skip
    g = tl.arange(0, ROWS)
    d = tl.arange(0, PAD)
    dv = tl.arange(0, PAD_V)
    q = tl.load(
        q_ptr + row * q_b + (kv_head * GROUPS + g).to(tl.int64)[:, None] * q_h + d[None, :] * q_d,
        mask=(g < GROUPS)[:, None] & (d < DIM)[None, :],
        other=0.0,
    )
    k_base = k_ptr + kv_head.to(tl.int64) * k_h + row * k_b + first * k_n + d[:, None] * k_d
    v_base = v_ptr + kv_head.to(tl.int64) * v_h + row * v_b + first * v_n + dv[None, :] * v_d
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PAD_V], tl.float32)
    for n in range(start, end, BLOCK_N):
        u = n + tl.arange(0, BLOCK_N)
        there = u < end
        j = u
        if WINDOW:
            j = tl.where(u < few, u, u - few + low)
        if HAS_REAL:
            there = there & (tl.load(real_ptr + row * kv_len + first + j, mask=there, other=0) != 0)
        j = j.to(tl.int64)
        k = tl.load(k_base + j[None, :] * k_n, mask=there[None, :] & (d < DIM)[:, None], other=0.0)
        v = tl.load(v_base + j[:, None] * v_n, mask=there[:, None] & (dv < DIM_V)[None, :], other=0.0)
        s = capped(tl.dot(q, k, input_precision="ieee") * scale, softcap, HAS_CAP)
        s = tl.where(there[None, :], s, float("-inf"))
        acc, m, l = step(acc, m, l, s, v, 1.0, SCALE=False, HIDDEN=True)
    finish(
        acc, m, l, out_ptr, lse_ptr, sink_ptr, part_ptr, done_ptr, row, kv_head, kv_heads, share, shares, most,
        ROWS, GROUPS, DIM_V, PAD_V, HAS_SINK, HAS_LSE, HEADS, CHUNK, 0, SINGLE, LAST,
    )  # fmt: skip
