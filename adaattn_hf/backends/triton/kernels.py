"""Flash attention over runs of queries and keys, in Triton.

Online softmax in base 2 with fp32 accumulation (FlashAttention-2's forward; Dao 2023), over a table of segments: row 6
numbers each, `(batch row, q_start, q_len, k_start, k_len, offset)`. Local query `i` stands at local key `p = i + offset`.
A key `j` is visible if `j <= p` (causal), `j > p - W` and, both ways, `j < p + W` (window), or `j < S` (sinks, within
causality). Tiles that every query of a block sees whole are computed without a mask.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    """tanh by one exponential; exact at both ends."""
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def _scores(q, k, scale, softcap, HAS_CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scores in base 2: `log2(e) * (softcapped scaling * q k^T)`."""
    s = tl.dot(q, k, input_precision="ieee") * scale
    if HAS_CAP:
        s = softcap * _tanh(s / softcap)
    return s * 1.4426950408889634


@triton.jit
def _visible(p, j, k_len, window, sinks, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Boolean tile of the rules in the module's docstring."""
    keep = (j < k_len)[None, :]
    if WINDOW:
        near = (j[None, :] > p[:, None] - window) | (j < sinks)[None, :]
        if not CAUSAL:
            near = near & ((j[None, :] < p[:, None] + window) | (j < sinks)[None, :])
        keep = keep & near
    if CAUSAL:
        keep = keep & (j[None, :] <= p[:, None])
    return keep


@triton.jit
def _step(acc, m, l, s, v):  # type: ignore[no-untyped-def]
    """One tile into the running maximum, sum and product; a row whose scores are all -inf stays as it is."""
    top = tl.maximum(m, tl.max(s, 1))
    base = tl.where(top == float("-inf"), 0.0, top)
    w = tl.exp2(s - base[:, None])
    decay = tl.exp2(m - base)
    l = l * decay + tl.sum(w, 1)
    acc = acc * decay[:, None] + tl.dot(w.to(v.dtype), v, input_precision="ieee").to(tl.float32)
    return acc, top, l


@triton.jit
def _masked(  # type: ignore[no-untyped-def]
    acc, m, l, q, k_base, v_base, p, j, inside, d, dv, k_len, k_n, k_d, v_n, v_d, scale, softcap, window, sinks,
    DIM: tl.constexpr, DIM_V: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    """One tile of the keys `j` that are `inside`, by the rules, into the running maximum, sum and product."""
    k = tl.load(
        k_base + j.to(tl.int64)[None, :] * k_n + d[:, None] * k_d,
        mask=inside[None, :] & (d < DIM)[:, None],
        other=0.0,
    )
    v = tl.load(
        v_base + j.to(tl.int64)[:, None] * v_n + dv[None, :] * v_d,
        mask=inside[:, None] & (dv < DIM_V)[None, :],
        other=0.0,
    )
    s = _scores(q, k, scale, softcap, HAS_CAP)
    keep = _visible(p, j, k_len, window, sinks, CAUSAL, WINDOW) & inside[None, :]
    return _step(acc, m, l, tl.where(keep, s, float("-inf")), v)


@triton.jit
def forward(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, sink_ptr, segments_ptr, tiles_ptr,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, o_b, o_n, o_h, o_d, l_b, l_h,
    scale, softcap, window, sinks,
    GROUPS: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, PAD: tl.constexpr, PAD_V: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINK: tl.constexpr, HAS_LSE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head; programs are (head, entry of the tile table)."""
    head = tl.program_id(0)
    tile = tl.program_id(1)
    segment = tl.load(tiles_ptr + 2 * tile)
    first = tl.load(tiles_ptr + 2 * tile + 1)
    row = tl.load(segments_ptr + 6 * segment).to(tl.int64)
    q_start = tl.load(segments_ptr + 6 * segment + 1)
    q_len = tl.load(segments_ptr + 6 * segment + 2)
    k_start = tl.load(segments_ptr + 6 * segment + 3)
    k_len = tl.load(segments_ptr + 6 * segment + 4)
    offset = tl.load(segments_ptr + 6 * segment + 5)

    i = first + tl.arange(0, BLOCK_M)
    real = i < q_len
    p = i + offset
    d = tl.arange(0, PAD)
    dv = tl.arange(0, PAD_V)
    kv_head = head // GROUPS
    q_rows = q_ptr + row * q_b + head * q_h + (q_start + i).to(tl.int64)[:, None] * q_n
    q = tl.load(q_rows + d[None, :] * q_d, mask=real[:, None] & (d < DIM)[None, :], other=0.0)
    k_base = k_ptr + row * k_b + kv_head * k_h + k_start.to(tl.int64) * k_n
    v_base = v_ptr + row * v_b + kv_head * v_h + v_n * k_start.to(tl.int64)

    low_p = first + offset
    high_p = tl.minimum(first + BLOCK_M, q_len) - 1 + offset
    # keys that some query of the block sees, and keys that all of them see
    start, stop = 0, k_len
    all_start, all_stop = 0, k_len
    if CAUSAL:
        stop = tl.minimum(k_len, high_p + 1)
        all_stop = tl.minimum(k_len, low_p + 1)
    if WINDOW:
        start = tl.maximum(0, low_p - window + 1)
        all_start = tl.maximum(0, high_p - window + 1)
        if not CAUSAL:
            stop = tl.minimum(k_len, high_p + window)
            all_stop = tl.minimum(k_len, low_p + window)
    start = (start // BLOCK_N) * BLOCK_N
    all_start = tl.maximum(start, (all_start + BLOCK_N - 1) // BLOCK_N * BLOCK_N)
    all_stop = tl.maximum(all_start, tl.maximum(all_stop, 0) // BLOCK_N * BLOCK_N)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINK:
        m = tl.full([BLOCK_M], 0.0, tl.float32) + tl.load(sink_ptr + head).to(tl.float32) * 1.4426950408889634
        l += 1.0
    acc = tl.zeros([BLOCK_M, PAD_V], tl.float32)

    if WINDOW:
        # sinks that lie before the window's first tile; those inside are let through by the rule
        for n in range(0, tl.minimum(sinks, start), BLOCK_N):
            j = n + tl.arange(0, BLOCK_N)
            inside = (j < start) & (j < sinks)
            acc, m, l = _masked(
                acc, m, l, q, k_base, v_base, p, j, inside, d, dv, k_len, k_n, k_d, v_n, v_d, scale, softcap, window, sinks,
                DIM, DIM_V, CAUSAL, WINDOW, HAS_CAP,
            )  # fmt: skip
        for n in range(start, tl.minimum(all_start, stop), BLOCK_N):
            j = n + tl.arange(0, BLOCK_N)
            inside = j < k_len
            acc, m, l = _masked(
                acc, m, l, q, k_base, v_base, p, j, inside, d, dv, k_len, k_n, k_d, v_n, v_d, scale, softcap, window, sinks,
                DIM, DIM_V, CAUSAL, WINDOW, HAS_CAP,
            )  # fmt: skip
    for n in range(all_start, all_stop, BLOCK_N):
        j = n + tl.arange(0, BLOCK_N)
        if PAD == DIM:
            k = tl.load(k_base + j.to(tl.int64)[None, :] * k_n + d[:, None] * k_d)
        else:
            k = tl.load(
                k_base + j.to(tl.int64)[None, :] * k_n + d[:, None] * k_d, mask=(d < DIM)[:, None], other=0.0
            )
        if PAD_V == DIM_V:
            v = tl.load(v_base + j.to(tl.int64)[:, None] * v_n + dv[None, :] * v_d)
        else:
            v = tl.load(
                v_base + j.to(tl.int64)[:, None] * v_n + dv[None, :] * v_d,
                mask=(dv < DIM_V)[None, :],
                other=0.0,
            )
        acc, m, l = _step(acc, m, l, _scores(q, k, scale, softcap, HAS_CAP), v)
    for n in range(all_stop, stop, BLOCK_N):
        j = n + tl.arange(0, BLOCK_N)
        inside = j < k_len
        acc, m, l = _masked(
            acc, m, l, q, k_base, v_base, p, j, inside, d, dv, k_len, k_n, k_d, v_n, v_d, scale, softcap, window, sinks,
            DIM, DIM_V, CAUSAL, WINDOW, HAS_CAP,
        )  # fmt: skip

    acc = acc / tl.where(l == 0, 1.0, l)[:, None]
    o_rows = out_ptr + row * o_b + head * o_h + (q_start + i).to(tl.int64)[:, None] * o_n
    tl.store(
        o_rows + dv[None, :] * o_d,
        acc.to(out_ptr.dtype.element_ty),
        mask=real[:, None] & (dv < DIM_V)[None, :],
    )
    if HAS_LSE:
        lse = (m + tl.log2(tl.where(l == 0, 1.0, l))) * 0.6931471805599453
        tl.store(lse_ptr + row * l_b + head * l_h + q_start + i, lse, mask=real)


@triton.jit
def decode(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, part_ptr, part_m_ptr, part_l_ptr, segments_ptr,
    q_b, q_h, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d,
    scale, softcap, window, sinks, span,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, PAD: tl.constexpr,
    PAD_V: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A share of the keys of one sequence and key/value head, for the one query of all its query heads.

    Programs are (key/value head, segment, share); a share is `span` keys. Writes unnormalised products with their
    maximum and sum; `merge` puts the shares together.
    """
    kv_head, segment, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(segments_ptr + 6 * segment).to(tl.int64)
    k_start = tl.load(segments_ptr + 6 * segment + 3)
    k_len = tl.load(segments_ptr + 6 * segment + 4)
    offset = tl.load(segments_ptr + 6 * segment + 5)
    g = tl.arange(0, ROWS)
    d = tl.arange(0, PAD)
    dv = tl.arange(0, PAD_V)
    q = tl.load(
        q_ptr + row * q_b + (kv_head * GROUPS + g)[:, None] * q_h + d[None, :] * q_d,
        mask=(g < GROUPS)[:, None] & (d < DIM)[None, :],
        other=0.0,
    )
    p = tl.zeros([ROWS], tl.int32) + offset
    stop = tl.minimum(k_len, (share + 1) * span)
    if CAUSAL:
        stop = tl.minimum(stop, offset + 1)
    start = share * span
    if WINDOW and start >= sinks:
        # a share whose sinks lie before it may skip to the window
        start = tl.maximum(start, tl.maximum(0, offset - window + 1) // BLOCK_N * BLOCK_N)
    k_base = k_ptr + row * k_b + kv_head * k_h + k_start.to(tl.int64) * k_n
    v_base = v_ptr + row * v_b + kv_head * v_h + v_n * k_start.to(tl.int64)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PAD_V], tl.float32)
    for n in range(start, stop, BLOCK_N):
        j = n + tl.arange(0, BLOCK_N)
        inside = j < stop
        acc, m, l = _masked(
            acc, m, l, q, k_base, v_base, p, j, inside, d, dv, k_len, k_n, k_d, v_n, v_d, scale, softcap, window, sinks,
            DIM, DIM_V, CAUSAL, WINDOW, HAS_CAP,
        )  # fmt: skip
    heads = tl.num_programs(0) * GROUPS
    place = (segment * heads + kv_head * GROUPS + g).to(tl.int64) * tl.num_programs(2) + share
    tl.store(
        part_ptr + place[:, None] * DIM_V + dv[None, :],
        acc,
        mask=(g < GROUPS)[:, None] & (dv < DIM_V)[None, :],
    )
    tl.store(part_m_ptr + place, m, mask=g < GROUPS)
    tl.store(part_l_ptr + place, l, mask=g < GROUPS)


@triton.jit
def merge(  # type: ignore[no-untyped-def]
    part_ptr, part_m_ptr, part_l_ptr, out_ptr, lse_ptr, sink_ptr, segments_ptr, o_b, o_h, o_d, l_b, l_h, shares,
    DIM_V: tl.constexpr, PAD_V: tl.constexpr, HAS_SINK: tl.constexpr, HAS_LSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The shares of one query and head by their log-sum-exp; programs are (head, segment)."""
    head, segment = tl.program_id(0), tl.program_id(1)
    row = tl.load(segments_ptr + 6 * segment).to(tl.int64)
    place = (segment * tl.num_programs(0) + head).to(tl.int64) * shares
    d = tl.arange(0, PAD_V)
    i = tl.arange(0, BLOCK)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    if HAS_SINK:
        top = tl.zeros([1], tl.float32) + tl.load(sink_ptr + head).to(tl.float32) * 1.4426950408889634
        total += 1.0
    acc = tl.zeros([PAD_V], tl.float32)
    for first in range(0, shares, BLOCK):
        inside = first + i < shares
        m = tl.load(part_m_ptr + place + first + i, mask=inside, other=float("-inf"))
        own = tl.load(part_l_ptr + place + first + i, mask=inside, other=0.0)
        rows = tl.load(
            part_ptr + (place + first + i)[:, None] * DIM_V + d[None, :],
            mask=inside[:, None] & (d < DIM_V)[None, :],
            other=0.0,
        )
        new = tl.maximum(top, tl.max(m, 0))
        base = tl.where(new == float("-inf"), 0.0, new)
        decay = tl.exp2(top - base)
        w = tl.exp2(m - base)
        total = total * decay + tl.sum(w * own, 0)
        acc = acc * decay + tl.sum(rows * w[:, None], 0)
        top = new
    acc = acc / tl.where(total == 0, 1.0, total)
    tl.store(out_ptr + row * o_b + head * o_h + d * o_d, acc.to(out_ptr.dtype.element_ty), mask=d < DIM_V)
    if HAS_LSE:
        base = tl.where(top == float("-inf"), 0.0, top)
        lse = (base + tl.log2(total)) * 0.6931471805599453
        tl.store(lse_ptr + row * l_b + head * l_h + tl.arange(0, 1), lse)
