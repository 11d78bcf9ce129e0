"""Decode step (one query per sequence) over quantised keys and values, multiplied as codes without converting each.

* Scores: a query is rounded to 16 bits relative to its largest channel and split into two int8 columns, so that products
  with int8 keys are int32 sums. Keys and channels are the rows of the tensor core's products and heads their columns,
  because there are many keys and few heads: four heads fill the smallest tile of eight columns.
* Values: codes become float16 two at a time. A byte written into the mantissa of 1024.0 is 1024 plus that byte; the
  constant's share of the weighted sum is subtracted afterwards. A softmax weight times its value's scale is a float16
  below 2, relative to the running maximum of that product.
* fp32 queries and weights are pairs of float16; the second holds the rounding error of the first.
* Each warp reads its own keys, so that no warp waits for another before the end.
"""

import triton
import triton.language as tl

from .decode import finish, reading, rotated, turned
from .launch import Launcher
from .tiles import capped


@triton.jit
def _bytes(  # type: ignore[no-untyped-def]
    k_ptr, v_ptr, real_ptr, first, k_n, v_n, tile_start, end, u, sink_keys, window_start, WINDOW: tl.constexpr, HAS_REAL: tl.constexpr,
):  # fmt: skip
    """Packed scale codes (`attention.stored.decode_scale`) of the keys and values at places `u`, for tile_start <= u < end.

    Bits 0-7: the key's scale; bits 8-15: the value's; bit 16: the key is real; bit 17: it is key 0 of its row.
    """
    j = tl.minimum(u, end - 1)
    if WINDOW:
        j = tl.where(j < sink_keys, j, j - sink_keys + window_start)
    j = j.to(tl.int64)
    valid = (u >= tile_start) & (u < end)
    k_byte, v_byte = tl.load(k_ptr + j * k_n, mask=valid, other=0), tl.load(v_ptr + j * v_n, mask=valid, other=0)
    if HAS_REAL:
        valid = tl.load(real_ptr + j, mask=valid, other=0) != 0
    return k_byte.to(tl.int32) | (v_byte.to(tl.int32) << 8) | tl.where(valid, 1 << 16, 0) | tl.where(first + j == 0, 1 << 17, 0)  # fmt: skip


@triton.jit
def _begin(tile_start, end, BLOCK: tl.constexpr, CLOSE: tl.constexpr):  # type: ignore[no-untyped-def]
    """First key of a tile; with CLOSE the last tile is moved back so that it ends with the keys."""
    return tl.maximum(tl.minimum(tile_start, end - BLOCK), 0) if CLOSE else tile_start


@triton.jit
def _pairs(x):  # type: ignore[no-untyped-def]
    """Packs 16-bit words `[w, c, n]` of neighbouring keys into 32-bit words `[w, c, n / 2]`."""
    even, odd = tl.split(x.reshape(x.shape[0], x.shape[1], x.shape[2] // 2, 2))
    return even.to(tl.uint32) | (odd.to(tl.uint32) << 16)


@triton.jit
def _numbers(pairs):  # type: ignore[no-untyped-def]
    """The float16 numbers `[w, c, n]` whose bits are packed in pairs."""
    both = tl.join(pairs.to(tl.uint16), (pairs >> 16).to(tl.uint16))
    return both.reshape(pairs.shape[0], pairs.shape[1], 2 * pairs.shape[2]).to(tl.float16, bitcast=True)


@triton.jit
def _onto(acc, pairs, weights, rescale, total, OFFSET: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Products of `_numbers` of codes, all OFFSET too large, and weights `[w, n, columns]`, onto sums that are scaled down.

    For queries in fp32 the codes are made right first: of the sum OFFSET would take seven bits or more.
    """
    values = _numbers(pairs)
    acc = acc * rescale[:, None, :]
    if WIDE:  # one way out: Triton 3.6 compiles what follows a return, too
        acc = tl.dot((values.to(tl.float32) - OFFSET).to(tl.float16), weights, acc)
    else:
        acc = tl.dot(values, weights, acc - OFFSET * total[:, None, :])
    return acc


@triton.jit
def _merged(acc, weight, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums over the warps `[w, c, columns]` weighted by `[w, rows]`: `[rows, c]`.

    Of two columns of a head the second are the parts of its weights that a float16 left over, or nothing.
    """
    WARPS: tl.constexpr = acc.shape[0]
    ROWS: tl.constexpr = weight.shape[1]
    if acc.shape[2] > ROWS:
        acc, rest = tl.split(acc.reshape(WARPS, acc.shape[1], ROWS, 2))
        if WIDE:
            acc = acc + rest * (1 / 2048)
    return tl.trans(tl.sum(acc * weight[:, None, :], 0))


@triton.jit
def _twice(x):  # type: ignore[no-untyped-def]
    """Each column of `[w, rows]` twice."""
    return tl.join(x, x).reshape(x.shape[0], 2 * x.shape[1])


@triton.jit
def _each(x, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """`[ROWS]` of rows that repeat, each two times and all of them until there are enough."""
    TIMES: tl.constexpr = x.shape[0] // (2 * ROWS)
    return tl.sum(tl.sum(x.reshape(TIMES, ROWS, 2), 2), 0) * (0.5 / TIMES)


# lengths grow by one in every step: they must not be compiled in
@Launcher
@triton.jit(do_not_specialize=["kv_len", "offset", "max_shares", "whole_shares", "span", "window", "sinks", "until"])
def decode_codes(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, sink_ptr, part_ptr, done_ptr, rows_ptr, offset_ptr, real_ptr, rules_ptr,
    q_b, q_h, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d,
    kv_len, offset, kv_heads, max_shares, whole_shares, span, window, sinks, until, scale, softcap,
    k_scale_ptr, v_scale_ptr, mean_ptr, first_ptr, ks_b, ks_h, ks_n, vs_b, vs_h, vs_n,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, PAD: tl.constexpr,
    PAD_V: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PER_HEAD: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SINK: tl.constexpr, HAS_LSE: tl.constexpr, TABLE: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_REAL: tl.constexpr,
    FIND: tl.constexpr, BLOCK_N: tl.constexpr, HEADS: tl.constexpr, CHUNK: tl.constexpr, SINGLE: tl.constexpr, LAST: tl.constexpr, BITS: tl.constexpr, HAS_MEAN: tl.constexpr, HAS_FIRST: tl.constexpr,
    ROTATION: tl.constexpr, ROTATION_V: tl.constexpr, SUMS: tl.constexpr, CLOSE: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """`decode.decode` over codes: int8 keys, values of BITS.

    Scales are read with the codes, `mean` is that of a head's keys, `first` the first key of the batch row. ROTATION
    and ROTATION_V are the blocks of channels by which keys and values were rotated (`attention.stored.hadamard`). SUMS:
    queries are turned without a matrix, which would fill the shared memory. Those in fp32 are, too: ptxas 12.8 compiled
    wrongly what their thousands of products by a matrix are. Channels of a row adjoin, and rows of values begin at even
    addresses; CLOSE: rows adjoin, too, and are powers of two, all are read, and there are BLOCK_N at least. A tile is
    BLOCK_N keys, shared out to WARPS.
    """
    WIDE: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    COLUMNS: tl.constexpr = 2 * ROWS
    Q_ROWS: tl.constexpr = COLUMNS if COLUMNS > 16 else 16
    KEYS_OF_WARP: tl.constexpr = BLOCK_N // WARPS
    FIELDS: tl.constexpr = 16 // BITS
    WORDS: tl.constexpr = DIM_V // FIELDS
    kv_head, share, shares, row, first, sink_keys, window_start, _, _, start, end = reading(
        rules_ptr, rows_ptr, offset_ptr, real_ptr, kv_len, offset, kv_heads, max_shares, whole_shares, span, window, sinks,
        until, BLOCK_N, CAUSAL, WINDOW, PER_HEAD, TABLE, HAS_OFFSET, FIND, HAS_REAL, 0, False,
    )  # fmt: skip
    i = tl.arange(0, WARPS)[:, None] * KEYS_OF_WARP + tl.arange(0, KEYS_OF_WARP)[None, :]
    c = tl.arange(0, PAD_V // FIELDS)
    k_base = k_ptr + row * k_b + kv_head.to(tl.int64) * k_h + first * k_n
    v_base = v_ptr + row * v_b + kv_head.to(tl.int64) * v_h + first * v_n
    k_scales = k_scale_ptr + row * ks_b + kv_head.to(tl.int64) * ks_h + first * ks_n
    v_scales = v_scale_ptr + row * vs_b + kv_head.to(tl.int64) * vs_h + first * vs_n
    real_base = real_ptr + row * kv_len + first
    # Queries are made ready for as long as the device needs for the first codes: these are asked for before that, one
    # byte of every 32, which is what memory gives out.
    prefetched = tl.minimum(start + tl.arange(0, 2 * BLOCK_N), tl.maximum(end - 1, 0))
    if WINDOW:
        prefetched = tl.where(prefetched < sink_keys, prefetched, prefetched - sink_keys + window_start)
    prefetched = prefetched.to(tl.int64)[:, None]
    k_at, v_at = tl.arange(0, PAD // 32)[None] * 32, tl.arange(0, PAD_V * BITS // 256)[None] * 32
    k_touched = tl.load(k_base + prefetched * k_n + k_at, mask=k_at < DIM, other=0).to(tl.int32)
    v_touched = tl.load(v_base + prefetched * v_n + v_at, mask=v_at < DIM_V * BITS // 8, other=0).to(tl.int32)
    v_base = v_base.to(tl.pointer_type(tl.uint16))
    # Bytes are too few for the pipeline of copies: they are asked for one tile ahead. Triton 3.6 lays out weights and codes
    # of values as it does the bytes of keys, four to a thread, which is wrong for fewer than 32 keys a warp.
    next_codes = _bytes(
        k_scales, v_scales, real_base, first, ks_n, vs_n, start, end, _begin(start, end, BLOCK_N, CLOSE) + i, sink_keys, window_start,
        WINDOW, HAS_REAL,
    )  # fmt: skip
    g = tl.arange(0, Q_ROWS)
    member = g // 2 % ROWS
    d = tl.arange(0, PAD)
    q_tile = tl.load(
        q_ptr + row * q_b + (kv_head * GROUPS + member).to(tl.int64)[:, None] * q_h + d[None, :] * q_d,
        mask=(member < GROUPS)[:, None] & (d < DIM)[None, :],
        other=0.0,
    )
    of_mean = tl.zeros([Q_ROWS], tl.float32)
    of_first = tl.zeros([Q_ROWS], tl.float32)
    if HAS_MEAN:
        mean = tl.load(mean_ptr + (row * kv_heads + kv_head) * DIM + d, mask=d < DIM, other=0.0)
    if HAS_FIRST:
        first_key = tl.load(first_ptr + (row * kv_heads + kv_head) * DIM + d, mask=d < DIM, other=0.0)
        of_first = tl.sum(q_tile.to(tl.float32) * first_key[None, :], 1)
    x = q_tile.to(tl.float32)
    # products of rotated queries and rotated keys are those of both as they were
    x = turned(x, PAD, ROTATION) if WIDE or SUMS else rotated(q_tile, 0, PAD, PAD, ROTATION, "ieee")
    if HAS_MEAN:
        of_mean = tl.sum(x * mean[None, :], 1)
    peak = tl.max(tl.abs(x), 1)
    LARGEST: tl.constexpr = 1 if WIDE else 32512
    unit = peak * (1 / LARGEST) + tl.sum(x * 0.0, 1)  # a channel that is no number makes its row none
    x = tl.where((peak > 0)[:, None], x * (LARGEST / tl.where(peak > 0, peak, 1.0))[:, None], 0.0)
    if WIDE:
        high = x.to(tl.float16).to(tl.float32)
        x = tl.where((g % 2 == 0)[:, None], high, (x - high) * 2048).to(tl.float16)
    else:
        whole = tl.floor(x + 0.5).to(tl.int32)
        high = (whole + 128) >> 8
        x = tl.where((g % 2 == 0)[:, None], high, whole - (high << 8)).to(tl.int8)
    # rows that hold the same: the parts of a query, and what fills up the product that turns queries
    unit = _each(unit, ROWS)
    of_mean = _each(of_mean, ROWS)
    of_first = _each(of_first, ROWS)
    if Q_ROWS > COLUMNS:
        x = tl.max(x.reshape(Q_ROWS // COLUMNS, COLUMNS, PAD), 0).to(x.dtype)
    x = tl.broadcast_to(tl.trans(x)[None], (WARPS, PAD, COLUMNS))

    V_COLUMNS: tl.constexpr = 2 * ROWS if WIDE or ROWS < 8 else ROWS
    row_max = tl.full([WARPS, ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([WARPS, KEYS_OF_WARP, ROWS], tl.float32)
    acc_0 = tl.zeros([WARPS, PAD_V // FIELDS, V_COLUMNS], tl.float32)
    acc_1, acc_2, acc_3 = acc_0, acc_0, acc_0
    # The device takes bits out and puts others in by one instruction, of whose two constants one must be in a register:
    # where the compiler knew both it would take two.
    touched = tl.max(tl.max(k_touched, 1), 0) + tl.max(tl.max(v_touched, 1), 0)  # at most 127 and 255
    unknown = tl.where(touched > 1000 + max_shares, 1, 0).to(tl.uint32)
    low_bytes, low_halves, high_halves = unknown + 0x00FF00FF, unknown + 0x000F000F, unknown + 0x00F000F0
    for tile_start in range(start, end, BLOCK_N):
        begin = _begin(tile_start, end, BLOCK_N, CLOSE)
        scale_codes = next_codes
        # codes are finite, and the weights of keys that are not there zero
        if CLOSE:
            at = begin.to(tl.int64)
            k_codes = tl.load(k_base + at * DIM + (i[:, :, None] * DIM + d[None, None, :]))
            v_codes = tl.load(v_base + at * WORDS + (i[:, :, None] * WORDS + c[None, None, :]))
        else:
            j = tl.minimum(begin + i, end - 1)
            if WINDOW:
                j = tl.where(j < sink_keys, j, j - sink_keys + window_start)
            j = j.to(tl.int64)[:, :, None]
            k_codes = tl.load(k_base + j * k_n + d[None, None, :], mask=(d < DIM)[None, None, :], other=0)
            v_codes = tl.load(v_base + j * (v_n // 2) + c[None, None, :], mask=(c < WORDS)[None, None, :], other=0)
        next_codes = _bytes(
            k_scales, v_scales, real_base, first, ks_n, vs_n, tile_start + BLOCK_N, end,
            _begin(tile_start + BLOCK_N, end, BLOCK_N, CLOSE) + i, sink_keys, window_start, WINDOW, HAS_REAL,
        )  # fmt: skip
        if WIDE:
            upper, lower = tl.split(tl.dot(k_codes.to(tl.float16), x).reshape(WARPS, KEYS_OF_WARP, ROWS, 2))
            scores = upper + lower * (1 / 2048)
        else:
            upper, lower = tl.split(tl.dot(k_codes, x, out_dtype=tl.int32).reshape(WARPS, KEYS_OF_WARP, ROWS, 2))
            scores = (upper * 256 + lower).to(tl.float32)
        scale_codes = scale_codes[:, :, None]
        k_scale = (((scale_codes & 255) << 20) + 897581056).to(tl.float32, bitcast=True)
        scores = scores * (unit[None, None, :] * k_scale) + of_mean[None, None, :]
        if HAS_FIRST:
            scores = tl.where(scale_codes >= 1 << 17, of_first[None, None, :], scores)
        # a value's scale is 2 ** power, which the running maximum takes in, times a number from 1 up to 2
        power = (scale_codes >> 11) & 31
        scores = capped(scores * scale, softcap, HAS_CAP) + power.to(tl.float32)
        scores = tl.where((scale_codes & (1 << 16)) != 0, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - shift[:, None, :])
        rescale = tl.exp2(row_max - shift)
        row_max = new_max
        row_sum = row_sum * rescale[:, None, :] + weights * ((127 - power) << 23).to(tl.float32, bitcast=True)
        weights = weights * (((scale_codes & 1792) << 12) | 1065353216).to(tl.float32, bitcast=True)
        rounded = weights.to(tl.float16)
        total = tl.sum(rounded.to(tl.float32), 1)
        if V_COLUMNS > ROWS:
            remainder = ((weights - rounded.to(tl.float32)) * 2048).to(tl.float16) if WIDE else tl.zeros_like(rounded)
            rounded = tl.join(rounded, remainder).reshape(WARPS, KEYS_OF_WARP, V_COLUMNS)
            rescale, total = _twice(rescale), _twice(total)
        pairs = _pairs(tl.permute(v_codes, (0, 2, 1)))
        if BITS == 8:
            acc_0 = _onto(acc_0, (pairs & low_bytes) ^ 0x64806480, rounded, rescale, total, 1152.0, WIDE)
            acc_1 = _onto(acc_1, ((pairs >> 8) & low_bytes) ^ 0x64806480, rounded, rescale, total, 1152.0, WIDE)
        else:  # halves of bytes, the high ones 16 times as large; 7.5 is the code of zero
            acc_0 = _onto(acc_0, (pairs & low_halves) | 0x64006400, rounded, rescale, total, 1031.5, WIDE)
            acc_1 = _onto(acc_1, (pairs & high_halves) | 0x64006400, rounded, rescale, total, 1144.0, WIDE)
            pairs = pairs >> 8
            acc_2 = _onto(acc_2, (pairs & low_halves) | 0x64006400, rounded, rescale, total, 1031.5, WIDE)
            acc_3 = _onto(acc_3, (pairs & high_halves) | 0x64006400, rounded, rescale, total, 1144.0, WIDE)

    new_max = tl.max(row_max, 0)
    weight = tl.exp2(row_max - tl.where(new_max == float("-inf"), 0.0, new_max)[None, :])
    row_sum = tl.sum(tl.sum(row_sum, 1) * weight, 0)
    weight = weight * 2.0**-20  # of the power 0
    if BITS == 8:
        acc = tl.join(_merged(acc_0, weight, WIDE), _merged(acc_1, weight, WIDE))
    else:  # a byte's high half stands 16 channels after its low one
        low_weight, high_weight = weight * 2.0, weight * 0.125
        acc = tl.join(_merged(acc_0, low_weight, WIDE), _merged(acc_2, low_weight, WIDE))
        acc = tl.join(acc, tl.join(_merged(acc_1, high_weight, WIDE), _merged(acc_3, high_weight, WIDE)))
        acc = tl.permute(acc.reshape(ROWS, PAD_V // 32, 8, 2, 2), (0, 1, 4, 2, 3))
    finish(
        acc.reshape(ROWS, PAD_V), new_max, row_sum, out_ptr, lse_ptr, sink_ptr, part_ptr, done_ptr, row, kv_head, kv_heads, share,
        shares, max_shares, ROWS, GROUPS, DIM_V, PAD_V, HAS_SINK, HAS_LSE, HEADS, CHUNK, ROTATION_V, SINGLE, LAST,
    )  # fmt: skip
