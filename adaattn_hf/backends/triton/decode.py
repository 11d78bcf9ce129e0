"""One query per sequence: the keys that each head reads are shared out among the device's multiprocessors.

FlashDecoding's split of the keys (Dao, Haziza, Massa and Sizov 2023), over the keys that a head really reads: with a window
these are its sinks and the window, counted through as if they adjoined. The last program to finish puts the shares of a
head together, so that a step is one launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .steps import capped, scores, step, step_over_codes


@triton.jit
def _signs(d, e, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows `d` and columns `e` of `attention.stored.hadamard`, blocks of BLOCK channels, without its factor."""
    both = d[:, None] & e[None, :] & (BLOCK - 1)
    both = both ^ (both >> 4)
    both = both ^ (both >> 2)
    odd = (both ^ (both >> 1)) & 1
    return tl.where(d[:, None] // BLOCK == e[None, :] // BLOCK, 1 - 2 * odd, 0)


@triton.jit
def _write(  # type: ignore[no-untyped-def]
    out_ptr, acc, head, inside, o_h, o_d,
    DIM_V: tl.constexpr, PAD_V: tl.constexpr, TURN_V: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Outputs of heads, `acc` turned back by blocks of TURN_V channels unless that is 0, so many columns at a time."""
    d = tl.arange(0, PAD_V)
    rows = out_ptr + head[:, None] * o_h
    if TURN_V:
        for first in range(0, DIM_V, COLUMNS):
            e = first + tl.arange(0, COLUMNS)
            part = tl.sum(acc[:, :, None] * _signs(d, e, TURN_V).to(tl.float32)[None, :, :], 1)
            part = (part * TURN_V**-0.5).to(out_ptr.dtype.element_ty)
            tl.store(rows + e[None, :] * o_d, part, mask=inside[:, None] & (e < DIM_V)[None, :])
    else:
        acc = acc.to(out_ptr.dtype.element_ty)
        tl.store(rows + d[None, :] * o_d, acc, mask=inside[:, None] & (d < DIM_V)[None, :])


@triton.jit
def _together(  # type: ignore[no-untyped-def]
    out_ptr, lse_ptr, sink_ptr, part_ptr, stats_ptr, pair, kv_head, shares, most, o_h, o_d, l_h,
    GROUPS: tl.constexpr, DIM_V: tl.constexpr, PAD_V: tl.constexpr, HAS_SINK: tl.constexpr, HAS_LSE: tl.constexpr,
    HEADS: tl.constexpr, CHUNK: tl.constexpr, TURN_V: tl.constexpr,
):  # fmt: skip
    """All shares of a key/value head by their log-sum-exp, CHUNK at a time, for its HEADS (a power of two) query heads."""
    g = tl.arange(0, HEADS)
    c = tl.arange(0, CHUNK)
    dv = tl.arange(0, PAD_V)
    inside = g < GROUPS
    head = kv_head * GROUPS + g
    m = tl.full([HEADS], float("-inf"), tl.float32)
    l = tl.zeros([HEADS], tl.float32)
    if HAS_SINK:
        m = tl.load(sink_ptr + head, mask=inside, other=0.0).to(tl.float32) * 1.4426950408889634
        l += 1.0
    acc = tl.zeros([HEADS, PAD_V], tl.float32)
    for first in range(0, shares, CHUNK):
        at = (pair * GROUPS + g)[:, None] * most + first + c[None, :]
        there = inside[:, None] & (first + c < shares)[None, :]
        its_m = tl.load(stats_ptr + 2 * at, mask=there, other=float("-inf"), cache_modifier=".cg")
        its_l = tl.load(stats_ptr + 2 * at + 1, mask=there, other=0.0, cache_modifier=".cg")
        its = tl.load(
            part_ptr + at[:, :, None] * DIM_V + dv[None, None, :],
            mask=there[:, :, None] & (dv < DIM_V)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        top = tl.maximum(m, tl.max(its_m, 1))
        base = tl.where(top == float("-inf"), 0.0, top)
        w, decay = tl.exp2(its_m - base[:, None]), tl.exp2(m - base)
        l = l * decay + tl.sum(its_l * w, 1)
        acc = acc * decay[:, None] + tl.sum(its * w[:, :, None], 1)
        m = top
    acc = acc / tl.where(l == 0, 1.0, l)[:, None]
    _write(out_ptr, acc, head, inside, o_h, o_d, DIM_V, PAD_V, TURN_V, CHUNK)
    if HAS_LSE:
        lse = (m + tl.log2(tl.where(l == 0, 1.0, l))) * 0.6931471805599453
        tl.store(lse_ptr + head * l_h, lse, mask=inside)


@triton.jit
def _scale(code):  # type: ignore[no-untyped-def]
    """The fp32 number that a one-byte scale stands for; see `attention.stored.decode_scale`."""
    return ((code.to(tl.int32) << 20) + 897581056).to(tl.float32, bitcast=True)


@triton.jit
def _scales(k_ptr, v_ptr, k_n, v_n, n, end, few, low, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scales' codes of the keys and values that are the tile from `n` on of those read."""
    u = n + tl.arange(0, BLOCK_N)
    j = u
    if WINDOW:
        j = tl.where(u < few, u, u - few + low)
    j = j.to(tl.int64)
    return tl.load(k_ptr + j * k_n, mask=u < end, other=0), tl.load(v_ptr + j * v_n, mask=u < end, other=0)


# lengths grow by one in every step: they must not be compiled in
@triton.jit(do_not_specialize=["kv_len", "offset", "most"])
def decode(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, sink_ptr, part_ptr, done_ptr, rows_ptr, offset_ptr, real_ptr, work_ptr,
    k_scale_ptr, v_scale_ptr, mean_ptr, first_ptr,
    q_b, q_h, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, o_b, o_h, o_d, l_b, l_h, r_b, r_n,
    ks_b, ks_h, ks_n, vs_b, vs_h, vs_n,
    kv_len, offset, kv_heads, most, scale, softcap,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, PAD: tl.constexpr,
    PAD_V: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINK: tl.constexpr,
    HAS_LSE: tl.constexpr, TABLE: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_REAL: tl.constexpr, BLOCK_N: tl.constexpr,
    HEADS: tl.constexpr, CHUNK: tl.constexpr, BITS: tl.constexpr, HAS_MEAN: tl.constexpr, HAS_FIRST: tl.constexpr,
    TURN: tl.constexpr, TURN_V: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A share of the keys of one sequence and key/value head, for the one query of all its query heads.

    Programs are (entry of the work table, sequence). An entry is (key/value head, share, shares of that head, its window,
    its sinks). A sequence is a row of `(batch row, first key, number of keys, offset)` with TABLE, else all keys of the
    batch row of its number; HAS_OFFSET reads the offset from the device, HAS_REAL leaves out keys that `real` denies.
    BITS says what the values are of a cache that stores codes, 8 or 4 (keys are int8 then), 0 for numbers; scales are
    read beside the codes, `mean` is that of a head's keys, `first` the first key of the batch row. TURN and TURN_V are the
    blocks of channels by which keys and values were turned (`attention.stored.hadamard`), 0 where they were not.
    `part` holds `[sequences, heads, most, DIM_V]` products of the shares, behind them their maxima and sums.
    """
    sequence = tl.program_id(1)
    entry = work_ptr + 5 * tl.program_id(0)
    kv_head = tl.load(entry)
    share = tl.load(entry + 1)
    shares = tl.load(entry + 2)
    row = sequence.to(tl.int64)
    k_start, k_len, at = 0, kv_len, offset
    k_base, v_base = k_ptr + kv_head * k_h, v_ptr + kv_head * v_h
    if HAS_OFFSET:
        at = tl.load(offset_ptr).to(tl.int32)
    if TABLE:
        row = tl.load(rows_ptr + 4 * sequence).to(tl.int64)
        k_start = tl.load(rows_ptr + 4 * sequence + 1).to(tl.int32)
        k_len = tl.load(rows_ptr + 4 * sequence + 2).to(tl.int32)
        at = tl.load(rows_ptr + 4 * sequence + 3).to(tl.int32)
        k_base += k_start.to(tl.int64) * k_n
        v_base += k_start.to(tl.int64) * v_n
    # the keys read: `few` sinks, then those from `low` to `stop`
    stop = k_len
    if CAUSAL:
        stop = tl.minimum(k_len, at + 1)
    low, few = 0, 0
    if WINDOW:
        window = tl.load(entry + 3)
        sinks = tl.load(entry + 4)
        low = tl.maximum(0, at - window + 1)
        few = tl.maximum(tl.minimum(tl.minimum(sinks, low), stop), 0)
        if not CAUSAL:
            stop = tl.minimum(k_len, tl.maximum(at + window, sinks))
    count = few + tl.maximum(stop - low, 0)
    span = tl.cdiv(tl.cdiv(count, shares), BLOCK_N) * BLOCK_N

    g = tl.arange(0, ROWS)
    d = tl.arange(0, PAD)
    dv = tl.arange(0, PAD_V)
    q = tl.load(
        q_ptr + row * q_b + (kv_head * GROUPS + g)[:, None] * q_h + d[None, :] * q_d,
        mask=(g < GROUPS)[:, None] & (d < DIM)[None, :],
        other=0.0,
    )
    k_base = k_base + row * k_b + d[:, None] * k_d
    column = dv
    if BITS == 4:
        column = dv // 32 * 16 + dv % 16
    v_base = v_base + row * v_b + column[None, :] * v_d
    shift = tl.zeros([ROWS], tl.float32)
    of_first = tl.zeros([ROWS], tl.float32)
    if HAS_FIRST:
        first = tl.load(first_ptr + (row * kv_heads + kv_head) * DIM + d, mask=d < DIM, other=0.0)
        of_first = tl.sum(q.to(tl.float32) * first[None, :], 1)
    if TURN:  # products of turned queries and turned keys are those of both as they were
        turned = tl.dot(q, _signs(d, d, TURN).to(q.dtype), input_precision="ieee")
        q = (turned * TURN**-0.5).to(q.dtype)
    if HAS_MEAN:
        mean = tl.load(mean_ptr + (row * kv_heads + kv_head) * DIM + d, mask=d < DIM, other=0.0)
        shift = tl.sum(q.to(tl.float32) * mean[None, :], 1)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PAD_V], tl.float32)
    end = tl.minimum(count, (share + 1) * span)
    if BITS:
        # bytes are too few for the pipeline of copies: a tile's scales are asked for one tile ahead
        k_scales = k_scale_ptr + row * ks_b + kv_head * ks_h + k_start * ks_n
        v_scales = v_scale_ptr + row * vs_b + kv_head * vs_h + k_start * vs_n
        k_next, v_next = _scales(k_scales, v_scales, ks_n, vs_n, share * span, end, few, low, WINDOW, BLOCK_N)
    for n in range(share * span, end, BLOCK_N):
        u = n + tl.arange(0, BLOCK_N)
        there = u < end
        j = u
        if WINDOW:
            j = tl.where(u < few, u, u - few + low)
        if HAS_REAL:
            there = there & (tl.load(real_ptr + row * r_b + (k_start + j) * r_n, mask=there, other=0) != 0)
        j = j.to(tl.int64)
        k = tl.load(k_base + j[None, :] * k_n, mask=there[None, :] & (d < DIM)[:, None], other=0.0)
        v = tl.load(v_base + j[:, None] * v_n, mask=there[:, None] & (dv < DIM_V)[None, :], other=0.0)
        if BITS:
            k_scale, v_scale = _scale(k_next), _scale(v_next)
            k_next, v_next = _scales(
                k_scales, v_scales, ks_n, vs_n, n + BLOCK_N, end, few, low, WINDOW, BLOCK_N
            )
            raw = tl.dot(q, k.to(q.dtype), input_precision="ieee") * k_scale[None, :] + shift[:, None]
            if HAS_FIRST:
                raw = tl.where((k_start + j == 0)[None, :], of_first[:, None], raw)
            s = capped(raw * scale, softcap, HAS_CAP)
            if BITS == 4:
                v = ((v >> (dv % 32 // 16 * 4)[None, :].to(tl.uint8)) & 15).to(tl.int8) * 2 - 15
            v = v.to(q.dtype)
            acc, m, l = step_over_codes(acc, m, l, tl.where(there[None, :], s, float("-inf")), v, v_scale)
        else:
            s = scores(q, k, scale, softcap, HAS_CAP)
            acc, m, l = step(acc, m, l, tl.where(there[None, :], s, float("-inf")), v)

    inside = g < GROUPS
    if shares == 1:
        head = kv_head * GROUPS + g
        if HAS_SINK:
            sink = tl.load(sink_ptr + head, mask=inside, other=0.0).to(tl.float32) * 1.4426950408889634
            top = tl.maximum(m, sink)
            l = l * tl.exp2(m - top) + tl.exp2(sink - top)
            acc = acc * tl.exp2(m - top)[:, None]
            m = top
        acc = acc / tl.where(l == 0, 1.0, l)[:, None]
        _write(out_ptr + row * o_b, acc, head, inside, o_h, o_d, DIM_V, PAD_V, TURN_V, COLUMNS)
        if HAS_LSE:
            lse = (m + tl.log2(tl.where(l == 0, 1.0, l))) * 0.6931471805599453
            tl.store(lse_ptr + row * l_b + head * l_h, lse, mask=inside)
    else:
        pair = (sequence * kv_heads + kv_head).to(tl.int64)
        stats_ptr = part_ptr + tl.num_programs(1).to(tl.int64) * kv_heads * GROUPS * most * DIM_V
        mine = (pair * GROUPS + g) * most + share
        tl.store(
            part_ptr + mine[:, None] * DIM_V + dv[None, :], acc, mask=inside[:, None] & (dv < DIM_V)[None, :]
        )
        tl.store(stats_ptr + 2 * mine, m, mask=inside)
        tl.store(stats_ptr + 2 * mine + 1, l, mask=inside)
        tl.debug_barrier()  # every thread has written before one thread says so
        if tl.atomic_add(done_ptr + pair, 1, sem="acq_rel") == shares - 1:
            _together(
                out_ptr + row * o_b, lse_ptr + row * l_b, sink_ptr, part_ptr, stats_ptr, pair, kv_head, shares, most, o_h, o_d, l_h,
                GROUPS, DIM_V, PAD_V, HAS_SINK, HAS_LSE, HEADS, CHUNK, TURN_V,
            )  # fmt: skip
