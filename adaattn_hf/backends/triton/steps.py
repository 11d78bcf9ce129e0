"""Helpers of the Triton kernels: scores, visibility, loads of tiles, and one tile of online softmax.

Online softmax in base 2 with fp32 accumulation (FlashAttention-2's forward; Dao 2023). A segment is a row of six numbers,
`(batch row, q_start, q_len, k_start, k_len, offset)`; its local query `i` stands at local key `p = i + offset`. A key `j`
is visible if `j <= p` (causal), `j > p - W` and, both ways, `j < p + W` (window), or `j < S` (sinks, within causality).
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


@triton.jit
def capped(s, softcap, HAS_CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scores in base 2, softcapped if HAS_CAP; without a cap `s` is in base 2 already."""
    if HAS_CAP:
        s = softcap * tanh(s / softcap) * 1.4426950408889634
    return s


@triton.jit
def scores(q, k, scale, softcap, HAS_CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scores in base 2: `log2(e) * (softcapped scaling * q k^T)`, where `scale` holds log2(e) unless there is a cap."""
    return capped(tl.dot(q, k, input_precision="ieee") * scale, softcap, HAS_CAP)


@triton.jit
def visible(p, j, limit, window, sinks, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Boolean `[p, j]` of the rules in the module's docstring; keys from `limit` on are not there."""
    keep = (j < limit)[None, :]
    if WINDOW:
        near = (j[None, :] > p[:, None] - window) | (j < sinks)[None, :]
        if not CAUSAL:
            near = near & ((j[None, :] < p[:, None] + window) | (j < sinks)[None, :])
        keep = keep & near
    if CAUSAL:
        keep = keep & (j[None, :] <= p[:, None])
    return keep


@triton.jit
def step(acc, m, l, s, v):  # type: ignore[no-untyped-def]
    """Adds one tile to the running maximum, sum and output; a row whose scores are all -inf stays as it is."""
    top = tl.maximum(m, tl.max(s, 1))
    base = tl.where(top == float("-inf"), 0.0, top)
    w = tl.exp2(s - base[:, None])
    decay = tl.exp2(m - base)
    l = l * decay + tl.sum(w, 1)
    acc = tl.dot(w.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, top, l


@triton.jit
def step_of_some(acc, m, l, s, v, scale):  # type: ignore[no-untyped-def]
    """As `step`, for scores not yet multiplied by `scale` > 0; hidden ones are -inf."""
    top = tl.maximum(m, tl.max(s, 1) * scale)
    base = tl.where(top == float("-inf"), 0.0, top)
    w = tl.exp2(s * scale - base[:, None])
    decay = tl.exp2(m - base)
    l = l * decay + tl.sum(w, 1)
    acc = tl.dot(w.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, top, l


@triton.jit
def step_of_all(acc, m, l, s, v, scale):  # type: ignore[no-untyped-def]
    """As `step`, for finite scores not yet multiplied by `scale` >= 0."""
    top = tl.maximum(m, tl.max(s, 1) * scale)
    w = tl.exp2(s * scale - top[:, None])
    decay = tl.exp2(m - top)
    l = l * decay + tl.sum(w, 1)
    acc = tl.dot(w.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, top, l


@triton.jit
def rows_of(base, j, d, n_stride, d_stride, count, DIM: tl.constexpr, PAD: tl.constexpr, ALL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows `j` of a matrix `[count, DIM]` as a tile `[j, PAD]`, zero where there is none; ALL: every row is there."""
    pointers = base + j.to(tl.int64)[:, None] * n_stride + d[None, :] * d_stride
    if ALL and PAD == DIM:
        return tl.load(pointers)
    if ALL:
        return tl.load(pointers, mask=(d < DIM)[None, :], other=0.0)
    return tl.load(pointers, mask=((j >= 0) & (j < count))[:, None] & (d < DIM)[None, :], other=0.0)


@triton.jit
def columns_of(  # type: ignore[no-untyped-def]
    base, j, d, n_stride, d_stride, count, DIM: tl.constexpr, PAD: tl.constexpr, ALL: tl.constexpr
):
    """The same transposed, `[PAD, j]`."""
    pointers = base + j.to(tl.int64)[None, :] * n_stride + d[:, None] * d_stride
    if ALL and PAD == DIM:
        return tl.load(pointers)
    if ALL:
        return tl.load(pointers, mask=(d < DIM)[:, None], other=0.0)
    return tl.load(pointers, mask=((j >= 0) & (j < count))[None, :] & (d < DIM)[:, None], other=0.0)
