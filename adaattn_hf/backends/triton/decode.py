"""Decode step (one query per sequence): the keys of each head are split among the device's multiprocessors.

FlashDecoding's split-K (Dao, Haziza, Massa and Sizov 2023) over the keys that a head really reads: with a window, the
sinks and the window as one contiguous range. The last program to finish merges the partial results of a head, so that a
step is one launch.
"""

import triton
import triton.language as tl

from .launch import Launcher
from .tiles import capped, step


@triton.jit
def _first_real(real_ptr, kv_len, LINE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Index of a row's first real key, kv_len where it has none."""
    at = 0
    first = kv_len
    while (first == kv_len) & (at < kv_len):
        j = at + tl.arange(0, LINE)
        real = tl.load(real_ptr + j, mask=j < kv_len, other=0) != 0
        first = tl.minimum(first, tl.min(tl.where(real, j, kv_len), 0))
        at += LINE
    return first


@triton.jit
def _held(borders_ptr, sequence):  # type: ignore[no-untyped-def]
    """The length of a sequence, by running sums."""
    return (tl.load(borders_ptr + sequence + 1) - tl.load(borders_ptr + sequence)).to(tl.int32)


@triton.jit
def reading(  # type: ignore[no-untyped-def]
    rules_ptr, rows_ptr, offset_ptr, real_ptr, kv_len, offset, kv_heads, max_shares, whole_shares, span, window, sinks, until,
    BLOCK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PER_HEAD: tl.constexpr, TABLE: tl.constexpr,
    HAS_OFFSET: tl.constexpr, FIND: tl.constexpr, HAS_REAL: tl.constexpr, PAGE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Head, share, shares, batch row and first key of a program; what it reads, whole tiles (TILES) and exactly; start, end.

    Programs are (sequence, share and head), with `max_shares` of each head, or `whole_shares` from position `until` on,
    where no window holds. `window` and `sinks` are those of the head that reads most; with PER_HEAD `rules` `[kv_heads, 2]`
    says each head's own. There, and of sequences of a table without padding, a head has only as many of these shares as
    hold `span` keys each: the other programs have nothing to do. A sequence is a row of `(batch row, first
    key, number of keys, offset)` with TABLE, else all keys of the batch row of its number, with FIND from the first one that
    `real` `[batch, kv_len]` holds to be real. Where the host knows no lengths `span` is the least of a share, of which a
    long sequence has more. With PAGE `offset_ptr` holds running sums of the sequences' lengths, and each query stands at
    its last key. HAS_OFFSET reads the offset from the device. Keys are counted through from
    the sinks to the window as if they adjoined: key `u` of those read is key `u` below the number of sinks, else
    `u - sinks` of the window. What is read are the number of sinks and the window's start, and both again as the rules say
    them: with TILES those read are rounded to whole tiles, whose other keys are left out of the sums.
    """
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1) % kv_heads
    share = tl.program_id(1) // kv_heads
    row = sequence.to(tl.int64)
    k_start, k_len, at = 0, kv_len, offset
    if HAS_OFFSET:
        at = tl.load(offset_ptr).to(tl.int32)
    if PAGE:
        k_len = _held(offset_ptr, sequence)
        at = k_len - 1
    if TABLE:
        row = tl.load(rows_ptr + 4 * row).to(tl.int64)
        k_start = tl.load(rows_ptr + 4 * sequence + 1).to(tl.int32)
        k_len = tl.load(rows_ptr + 4 * sequence + 2).to(tl.int32)
        at = tl.load(rows_ptr + 4 * sequence + 3).to(tl.int32)
    elif FIND:
        row_padding = real_ptr + row * kv_len
        k_start = _first_real(row_padding, kv_len, 2048)
        k_len = kv_len - k_start
        at -= k_start
        k_start = tl.minimum(k_start, kv_len - 1)  # of a row of padding alone: what is read ahead lies in the row
    stop = k_len
    if CAUSAL:
        stop = tl.minimum(k_len, at + 1)
    window_start, sink_keys = 0, 0
    limit, most = max_shares, stop
    if WINDOW:
        holds = at < until
        limit = tl.where(holds, max_shares, whole_shares)
        most = tl.where(holds, tl.minimum(stop, tl.minimum(window, stop) + tl.minimum(sinks, stop)), stop)
        if PER_HEAD:
            window = tl.load(rules_ptr + 2 * kv_head)
            sinks = tl.load(rules_ptr + 2 * kv_head + 1)
        window = tl.where(holds, window, 1 << 30)
        window_start = tl.maximum(0, at - window + 1)
        sink_keys = tl.maximum(tl.minimum(tl.minimum(sinks, window_start), stop), 0)
        if not CAUSAL:
            stop = tl.minimum(k_len, tl.maximum(at + window, sinks))
    skipped, before = window_start, sink_keys
    if TILES:
        skipped = window_start // BLOCK * BLOCK
        before = tl.cdiv(sink_keys, BLOCK) * BLOCK
    count = before + tl.maximum(stop - skipped, 0)
    shares = limit
    if PAGE or (PER_HEAD and not TABLE):
        span = tl.maximum(span, tl.cdiv(most, limit))
    if PER_HEAD or PAGE or (TABLE and not HAS_REAL):
        shares = tl.minimum(limit, tl.maximum(tl.cdiv(count, span), 1))
    span = tl.cdiv(tl.cdiv(count, shares), BLOCK) * BLOCK
    first = row * 0 + k_start
    return (
        kv_head, share, shares, row, first, before, skipped, sink_keys, window_start, share * span,
        tl.minimum(count, (share + 1) * span),
    )  # fmt: skip


@triton.jit
def signs(d, e, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Signs of rows `d` and columns `e` of `attention.stored.hadamard` with blocks of BLOCK channels, unnormalised."""
    both = d[:, None] & e[None, :] & (BLOCK - 1)
    both = both ^ (both >> 4)
    both = both ^ (both >> 2)
    odd = (both ^ (both >> 1)) & 1
    return tl.where(d[:, None] // BLOCK == e[None, :] // BLOCK, 1 - 2 * odd, 0)


@triton.jit
def rotated(  # type: ignore[no-untyped-def]
    x, first, PAD: tl.constexpr, COLUMNS: tl.constexpr, ROTATION: tl.constexpr, PRECISION: tl.constexpr
):
    """COLUMNS columns, from `first` on, of rows `[16 or more, PAD]` rotated by Hadamard blocks of ROTATION channels, in fp32.

    The matrix is the Kronecker product of two small ones, so that few signs have to be computed.
    """
    c, rows, columns = tl.arange(0, 16), tl.arange(0, PAD // 16), tl.arange(0, COLUMNS // 16)
    inner = signs(c, c, ROTATION if ROTATION < 16 else 16).to(x.dtype)
    outer = signs(rows, first // 16 + columns, ROTATION // 16 if ROTATION > 16 else 1).to(x.dtype)
    matrix = (outer[:, None, :, None] * inner[None, :, None, :]).reshape(PAD, COLUMNS)
    return tl.dot(x, matrix, input_precision=PRECISION) * ROTATION**-0.5


@triton.jit
def turned(x, PADDED: tl.constexpr, ROTATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """The same of few rows `[n, PADDED]`, which fill no product of the matrix units: by sums and differences of pairs."""
    d = tl.broadcast_to(tl.arange(0, PADDED)[None], x.shape)
    for bit in tl.static_range(8):
        if 1 << bit < ROTATION:
            other = tl.gather(x, d ^ (1 << bit), 1)
            x = tl.where((d >> bit) & 1 == 0, x + other, other - x)
    return x * ROTATION**-0.5


@triton.jit
def _write(  # type: ignore[no-untyped-def]
    out_ptr, lse_ptr, acc, row_max, row_sum, kv_head, ROWS: tl.constexpr, GROUPS: tl.constexpr, DIM_V: tl.constexpr,
    PAD_V: tl.constexpr, HAS_LSE: tl.constexpr, ROTATION_V: tl.constexpr,
):  # fmt: skip
    """Writes the outputs of a sequence's heads, rotated back by Hadamard blocks of ROTATION_V channels unless that is 0."""
    g = tl.arange(0, ROWS)
    acc = acc / tl.where(row_sum == 0, 1.0, row_sum)[:, None]
    if HAS_LSE:
        lse = (row_max + tl.log2(tl.where(row_sum == 0, 1.0, row_sum))) * 0.6931471805599453
        tl.store(lse_ptr + kv_head * GROUPS + g, lse, mask=g < GROUPS)
    if ROTATION_V and ROWS > 1 and out_ptr.dtype.element_ty != tl.float32:
        TILE_ROWS: tl.constexpr = ROWS if ROWS > 16 else 16
        g = tl.arange(0, TILE_ROWS)
        x = tl.broadcast_to(acc[None], (TILE_ROWS // ROWS, ROWS, PAD_V)).reshape(TILE_ROWS, PAD_V)
        rows = out_ptr + (kv_head * GROUPS + g)[:, None] * DIM_V
        for first in range(0, DIM_V, 32):
            d = first + tl.arange(0, 32)
            part = rotated(x, first, PAD_V, 32, ROTATION_V, "tf32x3")
            inside = (g < GROUPS)[:, None] & (d < DIM_V)[None, :]
            tl.store(rows + d[None, :], part.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        if ROTATION_V:
            acc = turned(acc, PAD_V, ROTATION_V)
        d = tl.arange(0, PAD_V)
        inside = (g < GROUPS)[:, None] & (d < DIM_V)[None, :]
        rows = out_ptr + (kv_head * GROUPS + g)[:, None] * DIM_V
        tl.store(rows + d[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _together(  # type: ignore[no-untyped-def]
    out_ptr, lse_ptr, sink_ptr, part_ptr, stats_ptr, pair, kv_head, shares, max_shares,
    GROUPS: tl.constexpr, DIM_V: tl.constexpr, PAD_V: tl.constexpr, HAS_SINK: tl.constexpr, HAS_LSE: tl.constexpr,
    HEADS: tl.constexpr, CHUNK: tl.constexpr, ROTATION_V: tl.constexpr,
):  # fmt: skip
    """Merges all partial results of a key/value head by log-sum-exp, CHUNK at a time; HEADS query heads, a power of two."""
    g = tl.arange(0, HEADS)
    c = tl.arange(0, CHUNK)
    dv = tl.arange(0, PAD_V)
    inside = g < GROUPS
    head = kv_head * GROUPS + g
    row_max = tl.full([HEADS], float("-inf"), tl.float32)
    row_sum = tl.zeros([HEADS], tl.float32)
    if HAS_SINK:
        row_max = tl.load(sink_ptr + head, mask=inside, other=0.0).to(tl.float32) * 1.4426950408889634
        row_sum += 1.0
    acc = tl.zeros([HEADS, PAD_V], tl.float32)
    for first in range(0, shares, CHUNK):
        places = (pair * GROUPS + g)[:, None] * max_shares + first + c[None, :]
        valid = inside[:, None] & (first + c < shares)[None, :]
        part_max = tl.load(stats_ptr + 2 * places, mask=valid, other=float("-inf"), cache_modifier=".cg")
        part_sum = tl.load(stats_ptr + 2 * places + 1, mask=valid, other=0.0, cache_modifier=".cg")
        part_acc = tl.load(
            part_ptr + places[:, :, None] * DIM_V + dv[None, None, :],
            mask=valid[:, :, None] & (dv < DIM_V)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_max = tl.maximum(row_max, tl.max(part_max, 1))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights, rescale = tl.exp2(part_max - shift[:, None]), tl.exp2(row_max - shift)
        row_sum = row_sum * rescale + tl.sum(part_sum * weights, 1)
        acc = acc * rescale[:, None] + tl.sum(part_acc * weights[:, :, None], 1)
        row_max = new_max
    _write(out_ptr, lse_ptr, acc, row_max, row_sum, kv_head, HEADS, GROUPS, DIM_V, PAD_V, HAS_LSE, ROTATION_V)


@triton.jit
def finish(  # type: ignore[no-untyped-def]
    acc, row_max, row_sum, out_ptr, lse_ptr, sink_ptr, part_ptr, done_ptr, row, kv_head, kv_heads, share, shares, max_shares,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, DIM_V: tl.constexpr, PAD_V: tl.constexpr, HAS_SINK: tl.constexpr,
    HAS_LSE: tl.constexpr, HEADS: tl.constexpr, CHUNK: tl.constexpr, ROTATION_V: tl.constexpr, SINGLE: tl.constexpr,
    LAST: tl.constexpr,
):  # fmt: skip
    """Writes the output if one program reads a whole head (SINGLE), else a partial result.

    `part` holds the partial outputs `[sequences, heads, max_shares, DIM_V]`, then their maxima and sums. With LAST the last
    program merges them: `done` counts the finished programs of a head and is reset to zero for the next step. Else
    `combine` does, which reads those of programs without keys, too.
    """
    g = tl.arange(0, ROWS)
    inside = g < GROUPS
    head = kv_head * GROUPS + g
    out_ptr += row * kv_heads * GROUPS * DIM_V
    lse_ptr += row * kv_heads * GROUPS
    if SINGLE:
        if HAS_SINK:
            sink = tl.load(sink_ptr + head, mask=inside, other=0.0).to(tl.float32) * 1.4426950408889634
            new_max = tl.maximum(row_max, sink)
            row_sum = row_sum * tl.exp2(row_max - new_max) + tl.exp2(sink - new_max)
            acc = acc * tl.exp2(row_max - new_max)[:, None]
            row_max = new_max
        _write(out_ptr, lse_ptr, acc, row_max, row_sum, kv_head, ROWS, GROUPS, DIM_V, PAD_V, HAS_LSE, ROTATION_V)
    elif share < (shares if LAST else max_shares):
        dv = tl.arange(0, PAD_V)
        pair = (tl.program_id(0) * kv_heads + kv_head).to(tl.int64)
        stats_ptr = part_ptr + tl.num_programs(0).to(tl.int64) * kv_heads * GROUPS * max_shares * DIM_V
        slots = (pair * GROUPS + g) * max_shares + share
        tl.store(part_ptr + slots[:, None] * DIM_V + dv[None, :], acc, mask=inside[:, None] & (dv < DIM_V)[None, :])
        tl.store(stats_ptr + 2 * slots, row_max, mask=inside)
        tl.store(stats_ptr + 2 * slots + 1, row_sum, mask=inside)
        if LAST:
            tl.debug_barrier()  # every thread has written before one thread says so
            if tl.atomic_add(done_ptr + pair, 1, sem="acq_rel") == shares - 1:
                tl.store(done_ptr + pair, 0)
                _together(
                    out_ptr, lse_ptr, sink_ptr, part_ptr, stats_ptr, pair, kv_head, shares, max_shares,
                    GROUPS, DIM_V, PAD_V, HAS_SINK, HAS_LSE, HEADS, CHUNK, ROTATION_V,
                )  # fmt: skip


@Launcher
@triton.jit(do_not_specialize=["max_shares"])
def combine(  # type: ignore[no-untyped-def]
    out_ptr, lse_ptr, sink_ptr, part_ptr, max_shares, DIM_V: tl.constexpr, PAD_V: tl.constexpr, HAS_SINK: tl.constexpr,
    HAS_LSE: tl.constexpr, CHUNK: tl.constexpr, ROTATION_V: tl.constexpr,
):  # fmt: skip
    """Merges what `finish` left of one query head of one sequence: heads at once, where one program would take turns."""
    heads = tl.num_programs(1)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    stats_ptr = part_ptr + tl.num_programs(0).to(tl.int64) * heads * max_shares * DIM_V
    _together(
        out_ptr + row * heads * DIM_V, lse_ptr + row * heads, sink_ptr, part_ptr, stats_ptr, row * heads + head, head,
        max_shares, max_shares, 1, DIM_V, PAD_V, HAS_SINK, HAS_LSE, 1, CHUNK, ROTATION_V,
    )  # fmt: skip


# lengths grow by one in every step: they must not be compiled in
@Launcher
@triton.jit(
    do_not_specialize=["kv_len", "offset", "max_shares", "whole_shares", "span", "window", "sinks", "until", "pages"]
)
def decode(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, sink_ptr, part_ptr, done_ptr, rows_ptr, offset_ptr, real_ptr, rules_ptr,
    q_b, q_h, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d,
    kv_len, offset, kv_heads, max_shares, whole_shares, span, window, sinks, until, scale, softcap,
    own_k_ptr, own_v_ptr, own_k_b, own_k_h, own_k_d, own_v_b, own_v_h, own_v_d, pages,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, PAD: tl.constexpr,
    PAD_V: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PER_HEAD: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SINK: tl.constexpr, HAS_LSE: tl.constexpr, TABLE: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_REAL: tl.constexpr,
    FIND: tl.constexpr, BLOCK_N: tl.constexpr, HEADS: tl.constexpr, CHUNK: tl.constexpr, SINGLE: tl.constexpr, LAST: tl.constexpr,
    PAGE: tl.constexpr, ONE_PAGE: tl.constexpr,
):  # fmt: skip
    """A share of the keys of one sequence and key/value head, for the one query of all its query heads.

    `reading` says which keys; HAS_REAL leaves out those that `real` (contiguous `[batch, kv_len]`) denies. `out`
    `[batch, heads, DIM_V]`, `lse` `[batch, heads]` and `part` (`finish`) are contiguous. With PAGE keys lie in pages of so
    many, whose numbers are the sequence's row of `rows` `[sequences, pages]`; ONE_PAGE: each tile lies in one. The program
    that reads a head's last key and value writes them there first, from `own_k` and `own_v` `[sequences, kv_heads, channels]`.
    """
    kv_head, share, shares, row, first, before, skipped, sink_keys, window_start, start, end = reading(
        rules_ptr, rows_ptr, offset_ptr, real_ptr, kv_len, offset, kv_heads, max_shares, whole_shares, span, window, sinks,
        until, BLOCK_N, CAUSAL, WINDOW, PER_HEAD, TABLE, HAS_OFFSET, FIND, HAS_REAL, PAGE, ONE_PAGE,
    )  # fmt: skip
    g = tl.arange(0, ROWS)
    d = tl.arange(0, PAD)
    dv = tl.arange(0, PAD_V)
    q_tile = tl.load(
        q_ptr + row * q_b + (kv_head * GROUPS + g).to(tl.int64)[:, None] * q_h + d[None, :] * q_d,
        mask=(g < GROUPS)[:, None] & (d < DIM)[None, :],
        other=0.0,
    )
    k_base = k_ptr + kv_head.to(tl.int64) * k_h + row * k_b + first * k_n + d[:, None] * k_d
    v_base = v_ptr + kv_head.to(tl.int64) * v_h + row * v_b + first * v_n + dv[None, :] * v_d
    table_ptr = rows_ptr + row * pages
    if PAGE:
        last = _held(offset_ptr, row) - 1
        writes_own = (start < end) & (end == before - skipped + last + 1)
        place = tl.load(table_ptr + tl.maximum(last, 0) // PAGE).to(tl.int64) * PAGE + last % PAGE
        k_there, v_there = d < tl.where(writes_own, DIM, 0), dv < tl.where(writes_own, DIM_V, 0)
        own_k = tl.load(own_k_ptr + row * own_k_b + kv_head * own_k_h + d * own_k_d, mask=k_there, other=0.0)
        own_v = tl.load(own_v_ptr + row * own_v_b + kv_head * own_v_h + dv * own_v_d, mask=v_there, other=0.0)
        tl.store(k_ptr + kv_head.to(tl.int64) * k_h + place * k_n + d * k_d, own_k, mask=k_there)
        tl.store(v_ptr + kv_head.to(tl.int64) * v_h + place * v_n + dv * v_d, own_v, mask=v_there)
        tl.debug_barrier()  # every thread has written before any reads
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PAD_V], tl.float32)
    for tile_start in range(start, end, BLOCK_N):
        u = tile_start + tl.arange(0, BLOCK_N)
        valid = u < end
        j, first_key = u, tile_start
        if WINDOW and ONE_PAGE:  # a tile is one of sinks or one of the window
            first_key = tl.where(tile_start < before, tile_start, tile_start - before + skipped)
            j = first_key + tl.arange(0, BLOCK_N)
            valid = valid & tl.where(tile_start < before, j < sink_keys, j >= window_start)
        elif WINDOW:
            j = tl.where(u < before, u, u - before + skipped)
        if HAS_REAL:
            valid = valid & (tl.load(real_ptr + row * kv_len + first + j, mask=valid, other=0) != 0)
        j = j.to(tl.int64)
        if PAGE and ONE_PAGE:
            j += (tl.load(table_ptr + first_key // PAGE).to(tl.int64) - first_key // PAGE) * PAGE
        elif PAGE:
            j = tl.load(table_ptr + j // PAGE, mask=valid, other=0).to(tl.int64) * PAGE + j % PAGE
        k_tile = tl.load(k_base + j[None, :] * k_n, mask=valid[None, :] & (d < DIM)[:, None], other=0.0)
        v_tile = tl.load(v_base + j[:, None] * v_n, mask=valid[:, None] & (dv < DIM_V)[None, :], other=0.0)
        scores = capped(tl.dot(q_tile, k_tile, input_precision="ieee") * scale, softcap, HAS_CAP)
        scores = tl.where(valid[None, :], scores, float("-inf"))
        acc, row_max, row_sum = step(acc, row_max, row_sum, scores, v_tile, 1.0, SCALE=False, HIDDEN=True)
    finish(
        acc, row_max, row_sum, out_ptr, lse_ptr, sink_ptr, part_ptr, done_ptr, row, kv_head, kv_heads, share, shares, max_shares,
        ROWS, GROUPS, DIM_V, PAD_V, HAS_SINK, HAS_LSE, HEADS, CHUNK, 0, SINGLE, LAST,
    )  # fmt: skip
