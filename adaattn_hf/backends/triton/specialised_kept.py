"""Attention over kept blocks of keys on Hopper, by warps with tasks of their own; lists, tables and results of `over_lists`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .warps import ROWS, add_tile, begin_rows, bounds_of, fetch, first_tile, last_values, ring, write_rows


@gluon.jit
def _entry(tables, PARTS: gl.constexpr):  # type: ignore[no-untyped-def]
    """What a program computes: (row, runs of queries and keys, heads), its work entry, blocks of both lists."""
    runs_ptr, work_ptr, _rules_ptr, _some_ptr, some_n_ptr, _every_ptr, every_n_ptr, _blocks = tables
    entry = gl.program_id(0) // PARTS
    run = runs_ptr + 6 * gl.load(work_ptr + 3 * entry)
    first = gl.load(work_ptr + 3 * entry + 1)
    kv_head = gl.load(work_ptr + 3 * entry + 2)
    place = (
        gl.load(run),
        gl.load(run + 1),
        gl.load(run + 2),
        gl.load(run + 3),
        gl.load(run + 4),
        gl.load(run + 5),
    )
    return place, first, kv_head, entry, gl.load(some_n_ptr + entry), gl.load(every_n_ptr + entry)


@gluon.jit
def _block(tables, entry, t, some_n, total):  # type: ignore[no-untyped-def]
    """The `t`-th block of an entry: those that need a mask come first; 0 behind the last one."""
    _runs_ptr, _work_ptr, _rules_ptr, some_ptr, _some_n_ptr, every_ptr, _every_n_ptr, blocks = tables
    base = entry.to(gl.int64) * blocks
    masked = gl.load(some_ptr + base + t, mask=t < some_n, other=0)
    return masked + gl.load(every_ptr + base + t - some_n, mask=(t >= some_n) & (t < total), other=0)


@gluon.jit
def _produce(  # type: ignore[no-untyped-def]
    k_bulk, v_bulk, tables, k_ring, v_ring, PARTS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fetches the blocks of both lists into the rings; which is next is asked for a block ahead."""
    place, _first, kv_head, entry, some_n, every_n = _entry(tables, PARTS)
    row, _q_start, _q_len, k_start, _k_len, _offset = place
    total = some_n + every_n
    block = _block(tables, entry, 0, some_n, total)
    for t in range(0, total):
        following = _block(tables, entry, t + 1, some_n, total)
        n = k_start + block * BLOCK_N
        fetch(k_bulk, k_ring, t, row, kv_head, n, n, STAGES)
        fetch(v_bulk, v_ring, t, row, kv_head, n, n, STAGES)
        block = following


@gluon.jit
def _bounds(  # type: ignore[no-untyped-def]
    p, block, kept, k_len, window, sinks, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, BLOCK_N: gl.constexpr
):
    """The bounds of `seen`, for rows at `p` that keep a block, by its bit, or see nothing of it."""
    last, before, of_sinks = bounds_of(p, block * BLOCK_N, k_len, window, sinks, CAUSAL, WINDOW)
    return gl.where(((kept.to(gl.int32) >> (block % 8)) & 1) != 0, last, -1), before, of_sinks


@gluon.jit
def _consume(  # type: ignore[no-untyped-def]
    WHICH: gl.constexpr, tensors, tables, strides, bitmap, scale, q_tiles, rings, GROUPS: gl.constexpr, PARTS: gl.constexpr,
    HEAD: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, HAS_SINK: gl.constexpr, HAS_LSE: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One group of warps: the 64 queries of an entry, of one head."""
    q_ptr, out_ptr, lse_ptr, sink_ptr = tensors
    q_b, q_h, q_n, o_b, o_n, o_h, l_b, l_h = strides
    bits_ptr, batch, q_rows, words = bitmap
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD, 16])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    # lines of 16 bytes a thread, as memory is read and written
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD, HEAD // 8], [4, 1], [1, 0])
    place, first, kv_head, entry, some_n, every_n = _entry(tables, PARTS)
    row_, q_start, q_len, _k_start, k_len, offset = place
    window, sinks = 0, 0
    if WINDOW:
        window = gl.load(tables[2] + 2 * kv_head)
        sinks = gl.load(tables[2] + 2 * kv_head + 1)
    total = some_n + every_n
    row = row_.to(gl.int64)
    head = (kv_head * GROUPS + gl.program_id(0) % PARTS * (GROUPS // PARTS) + WHICH).to(gl.int64)
    i = first + gl.arange(0, ROWS, gl.SliceLayout(1, LINES))
    d = gl.arange(0, HEAD, gl.SliceLayout(0, LINES))
    lines = (q_start + i).to(gl.int64)[:, None]
    q = q_tiles.index(WHICH)
    q.store(
        gl.load(
            q_ptr + row * q_b + head * q_h + lines * q_n + d[None, :], mask=(i < q_len)[:, None], other=0.0
        )
    )
    fence_async_shared()
    own = first + gl.arange(0, ROWS, OF_ROWS)
    p = own + offset
    bits = bits_ptr + ((kv_head.to(gl.int64) * batch + row) * q_rows + q_start + own) * (4 * words)
    m, l = begin_rows(sink_ptr, head, HAS_SINK, OF_ROWS)
    acc = gl.zeros([ROWS, HEAD], gl.float32, O_LAYOUT)
    if total > 0:
        # the first block is masked whatever list it is of: rows keep all that `every` holds
        block = _block(tables, entry, 0, some_n, total)
        kept = gl.load(bits + block // 8, mask=own < q_len, other=0)
        bounds = _bounds(p, block, kept, k_len, window, sinks, CAUSAL, WINDOW, BLOCK_N)
        block = _block(tables, entry, 1, some_n, total)
        kept = gl.load(bits + block // 8, mask=own < q_len, other=0)
        m, l, pairs = first_tile(
            m, l, q, rings, 0, scale, bounds, WINDOW, WHICH, 2, False, HEAD, BLOCK_N, STAGES, S_LAYOUT, dtype
        )  # fmt: skip
        for t in range(1, some_n):
            bounds = _bounds(p, block, kept, k_len, window, sinks, CAUSAL, WINDOW, BLOCK_N)
            block = _block(tables, entry, t + 1, some_n, total)
            kept = gl.load(bits + block // 8, mask=own < q_len, other=0)
            acc, m, l, pairs = add_tile(
                (acc, m, l, pairs), q, rings, t, scale, bounds, True, WINDOW, WHICH, 2, False, HEAD, BLOCK_N, STAGES,
                S_LAYOUT, O_LAYOUT, dtype,
            )  # fmt: skip
        for t in range(gl.maximum(some_n, 1), total):
            acc, m, l, pairs = add_tile(
                (acc, m, l, pairs), q, rings, t, scale, None, False, False, WHICH, 2, False, HEAD, BLOCK_N, STAGES,
                S_LAYOUT, O_LAYOUT, dtype,
            )  # fmt: skip
        acc = last_values(acc, pairs, rings[1], total - 1, HEAD, BLOCK_N, STAGES, O_LAYOUT, dtype)
    out = out_ptr + row * o_b + head * o_h + lines * o_n + d[None, :]
    lse = lse_ptr + row * l_b + head * l_h + q_start + own
    write_rows(acc, m, l, out, (i < q_len)[:, None], lse, own < q_len, HAS_LSE, LINES, O_LAYOUT, dtype)


@gluon.jit(do_not_specialize=["q_rows", "blocks"])
def specialised_kept(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, k_bulk, v_bulk, out_ptr, lse_ptr, sink_ptr, bits_ptr, some_ptr, some_n_ptr, every_ptr, every_n_ptr,
    runs_ptr, work_ptr, rules_ptr, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, o_b, o_n, o_h, o_d, l_b, l_h,
    batch, q_rows, words, blocks, scale, softcap,
    GROUPS: gl.constexpr, HEAD: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, HAS_SINK: gl.constexpr,
    HAS_LSE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The 64 queries of a work entry for two heads of its group; programs are entries times pairs of heads.

    Arguments are those of `over_lists`. Blocks are tiles, of BLOCK_N keys; keys and values are read by their descriptors
    alone, and scores have no softcap.
    """
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    PARTS: gl.constexpr = GROUPS // 2
    q_tiles = gl.allocate_shared_memory(
        dtype, [2, 64, HEAD], gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    )
    k_ring = ring(k_bulk, BLOCK_N, HEAD, STAGES, 2)
    v_ring = ring(v_bulk, BLOCK_N, HEAD, STAGES, 2)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    tensors = q_ptr, out_ptr, lse_ptr, sink_ptr
    tables = runs_ptr, work_ptr, rules_ptr, some_ptr, some_n_ptr, every_ptr, every_n_ptr, blocks
    strides = q_b, q_h, q_n, o_b, o_n, o_h, l_b, l_h
    bitmap = bits_ptr, batch, q_rows, words
    rings = k_ring, v_ring, turns
    gl.warp_specialize(
        [
            (_consume, (0, tensors, tables, strides, bitmap, scale, q_tiles, rings, GROUPS, PARTS, HEAD, CAUSAL, WINDOW, HAS_SINK, HAS_LSE, BLOCK_N, STAGES)),
            (_consume, (1, tensors, tables, strides, bitmap, scale, q_tiles, rings, GROUPS, PARTS, HEAD, CAUSAL, WINDOW, HAS_SINK, HAS_LSE, BLOCK_N, STAGES)),
            (_produce, (k_bulk, v_bulk, tables, k_ring, v_ring, PARTS, BLOCK_N, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
