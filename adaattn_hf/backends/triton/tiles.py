"""Helpers of the Triton kernels: entries of the work table, loads of tiles, visibility, one tile of online softmax.

Online softmax in base 2 with fp32 accumulation (FlashAttention-2's forward; Dao 2023). A segment is a row of six numbers,
`(batch row, q_start, q_len, k_start, k_len, offset)`; its local query `i` stands at local key `p = i + offset`. A key `j`
is visible if `j <= p` (causal), `j > p - W` and, both ways, `j < p + W` (window), or `j < S` (sinks, within causality).

Names in all kernels:

| name | what |
| --- | --- |
| `q`, `k`, `v`, `o`, `l` before `_` | queries, keys, values, output, log-sum-exp; `g` the gradient of the output, `dq`, `dk`, `dv` |
| `_b`, `_h`, `_n`, `_d` after it | strides of batch row, head, position and channel, in elements |
| `ks_`, `vs_`; `kc_`, `vc_` | scales and codes of a quantised cache |
| `_ptr`, `_bulk`, `_base` | a pointer; a TMA descriptor; the pointer to a head of a segment |
| `i`, `j`, `p`; `d`, `dv` | rows of queries, of keys, places of queries among keys; channels of keys and of values |
| `scores`, `weights` | of a tile: products in base 2, and their exponentials |
| `row_max`, `row_sum`, `acc` | running maximum in base 2, sum and weighted sum of values |
| `GROUPS`; `DIM`, `PAD` | query heads that share a key/value head; channels, up to a power of two; `_V` of values |
| `BLOCK_M`, `BLOCK_N` | queries and keys of a tile |
"""

import triton
import triton.language as tl


@triton.jit
def tanh(x):  # type: ignore[no-untyped-def]
    """tanh by one exponential; exact at both ends."""
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def capped(scores, softcap, HAS_CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scores in base 2, softcapped if HAS_CAP; without a cap their factor holds log2(e), and they are in base 2 already."""
    if HAS_CAP:
        scores = softcap * tanh(scores / softcap) * 1.4426950408889634
    return scores


@triton.jit
def visible(p, j, limit, window, sinks, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Boolean `[p, j]` of the rules in the module's docstring; keys from `limit` on are not there."""
    seen = (j < limit)[None, :]
    if WINDOW:
        near = (j[None, :] > p[:, None] - window) | (j < sinks)[None, :]
        if not CAUSAL:
            near = near & ((j[None, :] < p[:, None] + window) | (j < sinks)[None, :])
        seen = seen & near
    if CAUSAL:
        seen = seen & (j[None, :] <= p[:, None])
    return seen


@triton.jit
def step(acc, row_max, row_sum, scores, v_tile, scale, SCALE: tl.constexpr, HIDDEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Adds one tile to the running maximum, sum and output.

    SCALE: scores are not yet multiplied by `scale` > 0. HIDDEN: some may be -inf, and a row of such stays as it is.
    """
    new_max = tl.max(scores, 1)
    if SCALE:
        new_max = new_max * scale
        scores = scores * scale
    new_max = tl.maximum(row_max, new_max)
    shift = new_max
    if HIDDEN:
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - shift[:, None])
    rescale = tl.exp2(row_max - shift)
    row_sum = row_sum * rescale + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * rescale[:, None], input_precision="ieee")
    return acc, new_max, row_sum


@triton.jit
def rows_of(  # type: ignore[no-untyped-def]
    base, j, d, n_stride, d_stride, count, DIM: tl.constexpr, PAD: tl.constexpr, ALL: tl.constexpr,
    TURNED: tl.constexpr = False,
):  # fmt: skip
    """Rows `j` of a matrix `[count, DIM]` as a tile `[j, PAD]`, TURNED as `[PAD, j]`, zero where there is none.

    ALL: every row is there.
    """
    inside, in_range = d < DIM, (j >= 0) & (j < count)
    if TURNED:
        pointers = base + j.to(tl.int64)[None, :] * n_stride + d[:, None] * d_stride
        inside, in_range = inside[:, None], in_range[None, :]
    else:
        pointers = base + j.to(tl.int64)[:, None] * n_stride + d[None, :] * d_stride
        inside, in_range = inside[None, :], in_range[:, None]
    if ALL and PAD == DIM:
        tile = tl.load(pointers)
    elif ALL:
        tile = tl.load(pointers, mask=inside, other=0.0)
    else:
        tile = tl.load(pointers, mask=in_range & inside, other=0.0)
    return tile


@triton.jit
def entry_of(work_ptr, segments_ptr, rules_ptr, number, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """An entry of the work table: the six numbers of its segment, first row, key/value head, its window and sinks."""
    entry = work_ptr + 3 * number
    segment = segments_ptr + 6 * tl.load(entry)
    first = tl.load(entry + 1)
    kv_head = tl.load(entry + 2)
    row = tl.load(segment)
    q_start = tl.load(segment + 1)
    q_len = tl.load(segment + 2)
    k_start = tl.load(segment + 3)
    k_len = tl.load(segment + 4)
    offset = tl.load(segment + 5)
    window, sinks = 0, 0
    if WINDOW:
        window = tl.load(rules_ptr + 2 * kv_head)
        sinks = tl.load(rules_ptr + 2 * kv_head + 1)
    return row, q_start, q_len, k_start, k_len, offset, first, kv_head, window, sinks


@triton.jit
def keys_of(low, high, k_len, window, sinks, BLOCK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keys that some of the queries from `low` to `high` see, and those that all see; where either begins and ends.

    All but the end of the first are multiples of BLOCK; sinks before the window are not counted.
    """
    start, stop = 0, k_len
    all_start, all_stop = 0, k_len
    if CAUSAL:
        stop = tl.minimum(k_len, high + 1)
        all_stop = tl.minimum(k_len, low + 1)
    if WINDOW:
        start = tl.maximum(0, low - window + 1) // BLOCK * BLOCK
        all_start = tl.maximum(0, high - window + 1)
        if not CAUSAL:
            stop = tl.minimum(k_len, tl.maximum(high + window, sinks))
            all_stop = tl.minimum(k_len, low + window)
    all_start = tl.maximum(start, (all_start + (BLOCK - 1)) // BLOCK * BLOCK)
    all_stop = tl.maximum(all_start, tl.maximum(all_stop, 0) // BLOCK * BLOCK)
    return start, stop, all_start, all_stop


@triton.jit
def edges_of(start, stop, all_start, all_stop, sinks, BLOCK: tl.constexpr, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers of tiles by the rule: of the sinks before the window's first tile, then of both edges of the window."""
    of_sinks, of_left = 0, 0
    if WINDOW:
        of_sinks = tl.cdiv(tl.minimum(sinks, start), BLOCK)
        of_left = tl.cdiv(tl.maximum(tl.minimum(all_start, stop) - start, 0), BLOCK)
    return of_sinks, of_left, tl.cdiv(tl.maximum(stop - all_stop, 0), BLOCK)


@triton.jit
def edge_tile(tile, of_sinks, of_left, start, all_stop, k_len, sinks, BLOCK: tl.constexpr, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """First key of such a tile, and where its keys end: those of sinks where the window's tiles begin."""
    n = all_stop + (tile - of_sinks - of_left) * BLOCK
    limit = k_len
    if WINDOW:
        n = tl.where(tile < of_sinks + of_left, start + (tile - of_sinks) * BLOCK, n)
        n = tl.where(tile < of_sinks, tile * BLOCK, n)
        limit = tl.where(tile < of_sinks, tl.minimum(sinks, start), k_len)
    return n, limit
