"""One query per sequence over keys and values that are stored as codes, which no instruction converts one by one.

A query is rounded to 16 bits of its largest channel and cut into two bytes; its products with bytes of keys are sums in
int32. Codes of values become float16 where they are, two by two: a byte put into the mantissa of 1024 is 1024 plus that
byte. A weight, times the scale of its value, is a float16 below 2 in units of the largest scale seen. Each warp reads
keys of its own, so that none waits for another before the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .shares import finish, reading, turned
from .steps import capped


@triton.jit
def _bytes(k_ptr, v_ptr, real_ptr, k_n, v_n, u, end, few, low, WINDOW: tl.constexpr, HAS_REAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scales' codes of the keys and values that are number `u` of those read, and which of these keys are real.

    See `attention.stored.decode_scale`.
    """
    j = tl.minimum(u, end - 1)
    if WINDOW:
        j = tl.where(j < few, j, j - few + low)
    j = j.to(tl.int64)
    there = u < end
    k, v = tl.load(k_ptr + j * k_n, mask=there, other=0), tl.load(v_ptr + j * v_n, mask=there, other=0)
    if HAS_REAL:
        there = tl.load(real_ptr + j, mask=there, other=0) != 0
    return k, v, there


@triton.jit
def _upper(x):  # type: ignore[no-untyped-def]
    """The upper bytes of 16-bit words `[w, n, c]` moved down, by words of 32 bits, which the device shifts in one."""
    even, odd = tl.split(tl.permute(x.reshape(x.shape[0], x.shape[1] // 2, 2, x.shape[2]), (0, 1, 3, 2)))
    both = ((even.to(tl.uint32) | (odd.to(tl.uint32) << 16)) >> 8) & 0x00FF00FF
    both = tl.join(both.to(tl.uint16), (both >> 16).to(tl.uint16))
    return tl.permute(both, (0, 1, 3, 2)).reshape(x.shape)


@triton.jit
def _number(bits):  # type: ignore[no-untyped-def]
    """The float16 numbers with these bits."""
    return bits.to(tl.float16, bitcast=True)


@triton.jit
def _eight(x):  # type: ignore[no-untyped-def]
    """Codes in the lower and in the upper bytes of words."""
    return _number((x & 255) ^ 0x6480) - 1152.0, _number(_upper(x) ^ 0x6480) - 1152.0


@triton.jit
def _four(x):  # type: ignore[no-untyped-def]
    """Codes of four bits in the lower bytes of words, the low one and the high one."""
    return (_number((x & 15) | 0x6400) - 1024.0) * 2.0 - 15.0, _number((x & 240) | 0x6400) * 0.125 - 143.0


@triton.jit
def _onto(acc, w, v):  # type: ignore[no-untyped-def]
    """Products of weights and codes, in fp32 where queries are."""
    return tl.dot(w, v.to(w.dtype), acc, input_precision="ieee")


@triton.jit
def _merged(acc, weight, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums over the warps `[w, rows, c]`, weighted by `[w, ROWS]`; rows behind those are zero."""
    WARPS: tl.constexpr = acc.shape[0]
    acc = tl.sum(acc.reshape(WARPS, acc.shape[1] // ROWS, ROWS, acc.shape[2]), 1)
    return tl.sum(acc * weight[:, :, None], 0)


# lengths grow by one in every step: they must not be compiled in
@triton.jit(do_not_specialize=["kv_len", "offset", "most"])
def decode_codes(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, sink_ptr, part_ptr, done_ptr, rows_ptr, offset_ptr, real_ptr, work_ptr,
    q_b, q_h, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d,
    kv_len, offset, kv_heads, most, scale, softcap,
    k_scale_ptr, v_scale_ptr, mean_ptr, first_ptr, ks_b, ks_h, ks_n, vs_b, vs_h, vs_n,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, PAD: tl.constexpr,
    PAD_V: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINK: tl.constexpr,
    HAS_LSE: tl.constexpr, TABLE: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_REAL: tl.constexpr, BLOCK_N: tl.constexpr,
    HEADS: tl.constexpr, CHUNK: tl.constexpr, SINGLE: tl.constexpr, BITS: tl.constexpr, HAS_MEAN: tl.constexpr, HAS_FIRST: tl.constexpr,
    TURN: tl.constexpr, TURN_V: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """`decode.decode` over codes: int8 keys, values of BITS.

    Scales are read beside the codes, `mean` is that of a head's keys, `first` the first key of the batch row. TURN and
    TURN_V are the blocks of channels by which keys and values were turned (`attention.stored.hadamard`), 0 where they were
    not. Channels of a row adjoin, and rows of values begin at even addresses. A tile is BLOCK_N keys, shared out to WARPS.
    """
    WIDE: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    Q_ROWS: tl.constexpr = ROWS if WIDE else 2 * ROWS
    OWN: tl.constexpr = BLOCK_N // WARPS
    PARTS: tl.constexpr = 16 // BITS
    kv_head, share, shares, row, first, few, low, start, end = reading(
        work_ptr, rows_ptr, offset_ptr, kv_len, offset, BLOCK_N, CAUSAL, WINDOW, TABLE, HAS_OFFSET
    )
    g = tl.arange(0, Q_ROWS)
    d = tl.arange(0, PAD)
    q = tl.load(
        q_ptr + row * q_b + (kv_head * GROUPS + g % ROWS)[:, None] * q_h + d[None, :] * q_d,
        mask=(g % ROWS < GROUPS)[:, None] & (d < DIM)[None, :],
        other=0.0,
    )
    of_mean = tl.zeros([Q_ROWS], tl.float32)
    of_first = tl.zeros([Q_ROWS], tl.float32)
    if HAS_FIRST:
        first_key = tl.load(first_ptr + (row * kv_heads + kv_head) * DIM + d, mask=d < DIM, other=0.0)
        of_first = tl.sum(q.to(tl.float32) * first_key[None, :], 1)
    x = q.to(tl.float32)
    if TURN:  # products of turned queries and turned keys are those of both as they were
        x = turned(q, 0, PAD, PAD, TURN, "ieee")
    if HAS_MEAN:
        mean = tl.load(mean_ptr + (row * kv_heads + kv_head) * DIM + d, mask=d < DIM, other=0.0)
        of_mean = tl.sum(x * mean[None, :], 1)
    unit = tl.full([Q_ROWS], 1.0, tl.float32)
    if not WIDE:
        peak = tl.max(tl.abs(x), 1)
        unit = peak * (1 / 32512) + tl.sum(x * 0.0, 1)  # a channel that is no number makes its row none
        x = tl.where((peak > 0)[:, None], x * (32512 / tl.where(peak > 0, peak, 1.0))[:, None], 0.0)
        whole = tl.floor(x + 0.5).to(tl.int32)
        high = (whole + 128) >> 8
        x = tl.where((g < ROWS)[:, None], high, whole - (high << 8)).to(tl.int8)
        # both halves of the rows hold the same
        unit = tl.sum(unit.reshape(2, ROWS), 0) * 0.5
        of_mean = tl.sum(of_mean.reshape(2, ROWS), 0) * 0.5
        of_first = tl.sum(of_first.reshape(2, ROWS), 0) * 0.5
    x = tl.broadcast_to(x[None], (WARPS, Q_ROWS, PAD))

    i = tl.arange(0, WARPS)[:, None] * OWN + tl.arange(0, OWN)[None, :]
    c = tl.arange(0, PAD_V // PARTS)
    k_base = k_ptr + row * k_b + kv_head * k_h + first * k_n + d[None, None, :]
    v_base = v_ptr + row * v_b + kv_head * v_h + first * v_n
    v_base = v_base.to(tl.pointer_type(tl.uint16)) + c[None, None, :]
    k_scales = k_scale_ptr + row * ks_b + kv_head * ks_h + first * ks_n
    v_scales = v_scale_ptr + row * vs_b + kv_head * vs_h + first * vs_n
    W_ROWS: tl.constexpr = ROWS if ROWS > 16 else 16
    m = tl.full([WARPS, ROWS], float("-inf"), tl.float32)
    l = tl.zeros([WARPS, ROWS], tl.float32)
    power = tl.zeros([WARPS], tl.int32)
    acc_0 = tl.zeros([WARPS, W_ROWS, PAD_V // PARTS], tl.float32)
    acc_1, acc_2, acc_3 = acc_0, acc_0, acc_0
    real_base = real_ptr + row * kv_len + first
    # Bytes are too few for the pipeline of copies: they are asked for one tile ahead. Loaded beside the products they
    # would also make Triton 3.6 lay out the weights as bytes, which is wrong for 16 keys a warp.
    k_next, v_next, real_next = _bytes(
        k_scales, v_scales, real_base, ks_n, vs_n, start + i, end, few, low, WINDOW, HAS_REAL
    )
    for n in range(start, end, BLOCK_N):
        u = n + i
        there = real_next
        j = tl.minimum(u, end - 1)  # codes are finite, and the weights of keys that are not there zero
        if WINDOW:
            j = tl.where(j < few, j, j - few + low)
        j = j.to(tl.int64)
        if PAD == DIM:
            k = tl.load(k_base + j[:, :, None] * k_n)
        else:
            k = tl.load(k_base + j[:, :, None] * k_n, mask=(d < DIM)[None, None, :], other=0)
        if PAD_V == DIM_V:
            v = tl.load(v_base + j[:, :, None] * (v_n // 2))
        else:
            v = tl.load(
                v_base + j[:, :, None] * (v_n // 2), mask=(c < DIM_V // PARTS)[None, None, :], other=0
            )
        k_code, v_code = k_next.to(tl.int32), v_next.to(tl.int32)
        k_next, v_next, real_next = _bytes(
            k_scales, v_scales, real_base, ks_n, vs_n, u + BLOCK_N, end, few, low, WINDOW, HAS_REAL
        )
        k_scale = ((k_code << 20) + 897581056).to(tl.float32, bitcast=True)
        if WIDE:
            s = tl.dot(x, tl.permute(k, (0, 2, 1)).to(tl.float32), input_precision="ieee")
        else:
            both = tl.dot(x, tl.permute(k, (0, 2, 1)), out_dtype=tl.int32).reshape(WARPS, 2, ROWS, OWN)
            s = tl.sum(both * tl.where(tl.arange(0, 2) == 0, 256, 1)[None, :, None, None], 1).to(tl.float32)
        s = s * (unit[None, :, None] * k_scale[:, None, :]) + of_mean[None, :, None]
        if HAS_FIRST:
            s = tl.where((first + j == 0)[:, None, :], of_first[None, :, None], s)
        s = tl.where(there[:, None, :], capped(s * scale, softcap, HAS_CAP), float("-inf"))
        top = tl.maximum(m, tl.max(s, 2))
        base = tl.where(top == float("-inf"), 0.0, top)
        w = tl.exp2(s - base[:, :, None])
        decay = tl.exp2(m - base)
        l = l * decay + tl.sum(w, 2)
        m = top
        before = power
        power = tl.maximum(before, tl.max(v_code >> 3, 1))
        # weights in units of 2 ** power: scales as floats whose exponents are taken down by as much
        w = w * ((v_code << 20) + ((127 - power) << 23)[:, None]).to(tl.float32, bitcast=True)[:, None, :]
        decay = decay * ((127 + before - power) << 23).to(tl.float32, bitcast=True)[:, None]
        if ROWS < 16:
            w = tl.permute(tl.join(w, tl.zeros_like(w)), (0, 3, 1, 2)).reshape(WARPS, 16, OWN)
            decay = tl.permute(tl.join(decay, tl.zeros_like(decay)), (0, 2, 1)).reshape(WARPS, 16)
        if not WIDE:
            w = w.to(tl.float16)
        if BITS == 8:
            v_0, v_1 = _eight(v)
        else:
            v_0, v_1 = _four(v)
            v_2, v_3 = _four(_upper(v))
            acc_2 = _onto(acc_2 * decay[:, :, None], w, v_2)
            acc_3 = _onto(acc_3 * decay[:, :, None], w, v_3)
        acc_0 = _onto(acc_0 * decay[:, :, None], w, v_0)
        acc_1 = _onto(acc_1 * decay[:, :, None], w, v_1)

    top = tl.max(m, 0)
    weight = tl.exp2(m - tl.where(top == float("-inf"), 0.0, top)[None, :])
    l = tl.sum(l * weight, 0)
    weight = weight * ((107 + power) << 23).to(tl.float32, bitcast=True)[:, None]
    acc = tl.join(_merged(acc_0, weight, ROWS), _merged(acc_1, weight, ROWS))
    if BITS == 4:  # a byte's high half stands 16 channels behind its low one
        acc = tl.join(acc, tl.join(_merged(acc_2, weight, ROWS), _merged(acc_3, weight, ROWS)))
        acc = tl.permute(acc.reshape(ROWS, PAD_V // 32, 8, 2, 2), (0, 1, 3, 2, 4))
    finish(
        acc.reshape(ROWS, PAD_V), top, l, out_ptr, lse_ptr, sink_ptr, part_ptr, done_ptr, row, kv_head, kv_heads, share,
        shares, most, ROWS, GROUPS, DIM_V, PAD_V, HAS_SINK, HAS_LSE, HEADS, CHUNK, TURN_V, SINGLE,
    )  # fmt: skip
