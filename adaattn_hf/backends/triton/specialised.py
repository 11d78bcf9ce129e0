"""Warp-specialised (producer/consumer) attention of a block of queries on Hopper; rules and results of `forward`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from . import tiles
from .launch import Launcher
from .warps import (
    ROWS,
    add_tile,
    begin_rows,
    bring,
    bring_all,
    fetch,
    first_tile,
    last_values,
    ring,
    write_rows,
)

_keys_of = gluon.jit(tiles.keys_of.fn)


@gluon.jit
def _entry(tables, turn):  # type: ignore[no-untyped-def]
    """What the work table says of a program's item: segment, first row, heads; heads are -1 behind the last one.

    Its first row says how many items each program has.
    """
    _segments_ptr, work_ptr, _rules_ptr = tables
    entry = work_ptr + 3 * ((turn + 1) * gl.num_programs(0) + gl.program_id(0))
    return gl.load(entry), gl.load(entry + 1), gl.load(entry + 2)


@gluon.jit
def _item(tables, entry, W: gl.constexpr):  # type: ignore[no-untyped-def]
    """What a program computes by an entry: (row, runs of queries and keys, heads), (its rules), (its tiles).

    Where there is nothing for it the item has no queries and no tiles. Tiles are made of pieces: one, or with windows two
    that need not lie side by side, as sinks and the edge of a window would be a tile each.
    """
    PIECES: gl.constexpr = W.pieces
    PART: gl.constexpr = W.part
    segments_ptr, _work_ptr, rules_ptr = tables
    segment, first, heads = entry
    segment = segments_ptr + 6 * segment
    there = heads >= 0
    heads = gl.maximum(heads, 0)
    parts: gl.constexpr = W.sharing // W.together
    kv_head = heads // parts
    head = heads * W.together
    row = gl.load(segment)
    q_start = gl.load(segment + 1)
    q_len = gl.where(there, gl.load(segment + 2), 0)
    k_start = gl.load(segment + 3)
    k_len = gl.where(there, gl.load(segment + 4), 0)
    offset = gl.load(segment + 5)
    window, sinks = 0, 0
    if W.window:
        window = gl.load(rules_ptr + 2 * kv_head)
        sinks = gl.load(rules_ptr + 2 * kv_head + 1)
    start, stop, all_start, all_stop = _keys_of(
        first + offset, gl.minimum(first + W.rows, q_len) - 1 + offset, k_len, window, sinks, PART, W.causal, W.window
    )  # fmt: skip
    # pieces by the rule: those of the sinks before what all rows see, then both edges of the window
    of_sinks, of_left, apart = 0, 0, 0
    if W.window:
        apart = gl.minimum(gl.minimum(sinks, all_start), k_len)
        of_sinks = gl.cdiv(apart, PART)
        of_left = gl.cdiv(gl.maximum(gl.minimum(all_start, stop) - start, 0), PART)
    left = of_sinks + of_left
    edges = left + gl.cdiv(gl.maximum(stop - all_stop, 0), PART)
    pieces = edges + (all_stop - all_start) // PART
    # half of a tile more, of keys after what is seen
    edges += pieces % PIECES
    total = gl.where(there, gl.cdiv(pieces, PIECES), 0)
    place = row, q_start, q_len, k_start, kv_head, head, first
    tiles = of_sinks, left, edges, total, start, all_start, all_stop, stop
    return place, (k_len, offset, window, sinks, apart), tiles


@gluon.jit
def _first_key(piece, tiles, W: gl.constexpr):  # type: ignore[no-untyped-def]
    """Of a piece of an item: those at the edges come first."""
    of_sinks, left, edges, _total, start, all_start, all_stop, _stop = tiles
    n = all_stop + (piece - left) * W.part
    if W.window:
        n = gl.where(piece < left, start + (piece - of_sinks) * W.part, n)
        n = gl.where(piece < of_sinks, piece * W.part, n)
    return gl.where(piece < edges, n, all_start + (piece - edges) * W.part)


@gluon.jit
def _brought(n, k_len, W: gl.constexpr):  # type: ignore[no-untyped-def]
    """First key that is brought for the piece from `n` on; with `W.close` the last piece is moved back to end with the keys.

    What lies after them may be of others, and what is not a number there would remain so by a weight of 0.
    """
    return gl.minimum(n, gl.maximum(k_len - W.part, 0)) if W.close else n


@gluon.jit
def _bounds_of_piece(p, piece, tiles, rules, W: gl.constexpr):  # type: ignore[no-untyped-def]
    """Each row's last key of a piece, and the one before its window; sinks end before `apart`, where others begin."""
    k_len, _offset, window, sinks, apart = rules
    n = _first_key(piece, tiles, W)
    at = _brought(n, k_len, W)
    limit = k_len
    if W.window:
        limit = gl.where(piece < tiles[0], apart, k_len)
    last = gl.zeros_like(p) + (limit - 1 - at)
    if W.causal:
        last = gl.minimum(p - at, last)
    elif W.window:
        last = gl.minimum(gl.maximum(p - at + window, sinks - at) - 1, last)
    before = p - at - window
    own = n - 1 - at  # keys before its own, of a piece that was moved, are of the one before
    if W.window:
        before = gl.where(piece < tiles[0], own, gl.maximum(before, gl.maximum(apart - 1 - at, own)))
    elif W.close:
        before = gl.zeros_like(p) + own
    return last, before


@gluon.jit
def _bounds(p, t, tiles, rules, W: gl.constexpr):  # type: ignore[no-untyped-def]
    """The bounds of `seen` in an item's tile `t`."""
    last, before = _bounds_of_piece(p, W.pieces * t, tiles, rules, W)
    if W.pieces == 1:
        then = last - W.keys // 2, before - W.keys // 2
    else:
        then = _bounds_of_piece(p, W.pieces * t + 1, tiles, rules, W)
    return last, before, then


@gluon.jit
def _produce(k_bulk, v_bulk, tables, rings, W: gl.constexpr):  # type: ignore[no-untyped-def]
    """Fetches the tiles of all items into the rings."""
    count = 0
    following = _entry(tables, 0)
    for turn in range(0, gl.load(tables[1] + 3 * gl.program_id(0))):
        entry, following = following, _entry(tables, turn + 1)
        place, rules, tiles = _item(tables, entry, W)
        row, _q_start, _q_len, k_start, kv_head, _head, _first = place
        for t in range(0, tiles[3]):
            if W.window:
                # a piece after what is seen brings the last one that is: what lies there may be of others
                most = (tiles[7] - 1) // W.part * W.part
                n = gl.minimum(_first_key(2 * t, tiles, W), most)
                then = gl.minimum(_first_key(2 * t + 1, tiles, W), most)
                n = k_start + _brought(n, rules[0], W)
                then = k_start + _brought(then, rules[0], W)
            else:
                n = k_start + _brought(_first_key(t, tiles, W), rules[0], W)
                then = n
            fetch(k_bulk, rings[0], count, row, kv_head, n, then, W)
            fetch(v_bulk, rings[1], count, row, kv_head, n, then, W)
            count += 1


@gluon.jit
def _begin_queries(q, q_ptr, strides, place, WHICH: gl.constexpr, W: gl.constexpr, LINES: gl.constexpr):  # type: ignore[no-untyped-def]
    """Begins to bring the queries of an item that a group of warps computes."""
    row, q_start, q_len, _k_start, _kv_head, head, first = place
    if W.together > 1:
        head += WHICH
    else:
        first += WHICH * ROWS
    i = first + gl.arange(0, ROWS, gl.SliceLayout(1, LINES))
    d = gl.arange(0, W.dim, gl.SliceLayout(0, LINES))
    q_rows = q_ptr + row.to(gl.int64) * strides[0] + head.to(gl.int64) * strides[1]
    q_rows += (q_start + i).to(gl.int64)[:, None] * strides[2]
    bring(q, q_rows + d[None, :], (i < q_len)[:, None])


@gluon.jit
def _consume(WHICH: gl.constexpr, tensors, tables, strides, scale, q_tiles, rings, W: gl.constexpr):  # type: ignore[no-untyped-def]
    """One group of warps: 64 queries of every item of the program, of a head of their own where heads go together.

    With `W.ahead` the queries of the next item come while this one is computed.
    """
    q_ptr, out_ptr, lse_ptr, sink_ptr = tensors
    _q_b, _q_h, _q_n, o_b, o_n, o_h, l_b, l_h = strides
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W.keys, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W.dim, 16])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    # lines of 16 bytes a thread, as memory is read and written
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // W.dim, W.dim // 8], [4, 1], [1, 0])
    line = gl.arange(0, ROWS, gl.SliceLayout(1, LINES))
    d = gl.arange(0, W.dim, gl.SliceLayout(0, LINES))
    count = 0
    following = _entry(tables, 0)
    if W.ahead:
        place, _rules, _tiles = _item(tables, following, W)
        _begin_queries(q_tiles.index(2 * WHICH), q_ptr, strides, place, WHICH, W, LINES)
    for turn in range(0, gl.load(tables[1] + 3 * gl.program_id(0))):
        entry, following = following, _entry(tables, turn + 1)
        place, rules, tiles = _item(tables, entry, W)
        if W.ahead:
            q = q_tiles.index(2 * WHICH + turn % 2)
            bring_all()
            then, _rules, _tiles = _item(tables, following, W)
            to = q_tiles.index(2 * WHICH + (turn + 1) % 2)
            _begin_queries(to, q_ptr, strides, then, WHICH, W, LINES)
        else:
            q = q_tiles.index(WHICH)
            _begin_queries(q, q_ptr, strides, place, WHICH, W, LINES)
            bring_all()
        row, q_start, q_len, _k_start, _kv_head, head, first = place
        _k_len, offset, _window, _sinks, _apart = rules
        edges = gl.cdiv(tiles[2], W.pieces)
        total = tiles[3]
        if W.together > 1:
            head += WHICH
        else:
            first += WHICH * ROWS
        row, head = row.to(gl.int64), head.to(gl.int64)
        i = first + line
        own = first + gl.arange(0, ROWS, OF_ROWS)
        p = own + offset
        m, l = begin_rows(sink_ptr, head, W.sink, OF_ROWS)
        acc = gl.zeros([ROWS, W.dim], gl.float32, O_LAYOUT)
        if total > 0:
            bounds = _bounds(p, 0, tiles, rules, W)
            m, l, pairs = first_tile(m, l, q, rings, count, scale, bounds, WHICH, W, S_LAYOUT, dtype)
            count += 1
            # one loop for both edges of a window: what runs once an item should be little code, which is fetched again
            for t in range(1, edges):
                bounds = _bounds(p, t, tiles, rules, W)
                acc, m, l, pairs = add_tile(
                    (acc, m, l, pairs), q, rings, count, scale, bounds, True, W.window or W.close, WHICH, W,
                    S_LAYOUT, O_LAYOUT, dtype,
                )  # fmt: skip
                count += 1
            for _t in range(gl.maximum(edges, 1), total):
                acc, m, l, pairs = add_tile(
                    (acc, m, l, pairs), q, rings, count, scale, None, False, False, WHICH, W, S_LAYOUT, O_LAYOUT, dtype
                )  # fmt: skip
                count += 1
            acc = last_values(acc, pairs, rings[1], count - 1, W, O_LAYOUT, dtype)
        out = out_ptr + row * o_b + head * o_h + (q_start + i).to(gl.int64)[:, None] * o_n + d[None, :]
        lse = lse_ptr + row * l_b + head * l_h + q_start + own
        write_rows(acc, m, l, out, (i < q_len)[:, None], lse, own < q_len, W.lse, LINES, O_LAYOUT, dtype)


@Launcher
@gluon.jit
def specialised(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, k_bulk, v_bulk, out_ptr, lse_ptr, sink_ptr, segments_ptr, work_ptr, rules_ptr,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, o_b, o_n, o_h, o_d, l_b, l_h, scale, softcap,
    W: gl.constexpr,
):  # fmt: skip
    """Items of the work table, dealt out to the programs; arguments as of `forward`, `W` a `tiling.Warps`.

    An item is (segment, first row, number of its heads that go together): 64 queries of these heads, one for each group of
    warps, or as many times 64 of one head. A program computes the items of its column of the table that
    `tables.deal_items` makes. Channels lie side by side; keys and values are only read by their descriptors, and scores
    have no softcap.
    """
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    GROUPS: gl.constexpr = W.groups
    q_tiles = gl.allocate_shared_memory(
        dtype,
        [GROUPS * (2 if W.ahead else 1), 64, W.dim],
        gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2),
    )
    k_ring = ring(k_bulk, W)
    v_ring = ring(v_bulk, W)
    turns = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    for which in gl.static_range(GROUPS):
        mbarrier.init(turns.index(which), count=1)
    tables = segments_ptr, work_ptr, rules_ptr
    strides = q_b, q_h, q_n, o_b, o_n, o_h, l_b, l_h
    rings = k_ring, v_ring, turns
    tensors = q_ptr, out_ptr, lse_ptr, sink_ptr
    # registers of a thread: the 65,536 of a multiprocessor less those of the copying warp, for the groups alike
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_consume, (0, tensors, tables, strides, scale, q_tiles, rings, W)),
                (_consume, (1, tensors, tables, strides, scale, q_tiles, rings, W)),
                (_produce, (k_bulk, v_bulk, tables, (k_ring, v_ring), W)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, tensors, tables, strides, scale, q_tiles, rings, W)),
                (_consume, (1, tensors, tables, strides, scale, q_tiles, rings, W)),
                (_consume, (2, tensors, tables, strides, scale, q_tiles, rings, W)),
                (_produce, (k_bulk, v_bulk, tables, (k_ring, v_ring), W)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )
