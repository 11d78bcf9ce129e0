"""Warp-specialised (producer/consumer) attention of a block of queries on Hopper; rules and results of `forward`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from . import tiles
from .launch import Launcher
from .warps import (
    ROWS,
    add_tile,
    begin_rows,
    bounds_of,
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
    """What the work table says of a program's item: segment, first row, heads; heads are -1 behind the last one."""
    _segments_ptr, work_ptr, _rules_ptr = tables
    entry = work_ptr + 3 * ((turn + 1) * gl.num_programs(0) + gl.program_id(0))
    return gl.load(entry), gl.load(entry + 1), gl.load(entry + 2)


@gluon.jit
def _turns(tables):  # type: ignore[no-untyped-def]
    """How many items a program has, by the first row of the work table."""
    return gl.load(tables[1] + 3 * gl.program_id(0))


@gluon.jit
def _item(  # type: ignore[no-untyped-def]
    tables, entry, GROUPS: gl.constexpr, TOGETHER: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """What a program computes by an entry: (row, runs of queries and keys, heads), (its rules), (its tiles).

    Where there is nothing for it the item has no queries and no tiles. Tiles are made of pieces of PART keys: one, or
    with windows two that need not lie side by side, as sinks and the edge of a window would be a tile each.
    """
    PIECES: gl.constexpr = 2 if WINDOW else 1
    PART: gl.constexpr = BLOCK_N // PIECES
    segments_ptr, _work_ptr, rules_ptr = tables
    segment, first, heads = entry
    segment = segments_ptr + 6 * segment
    there = heads >= 0
    heads = gl.maximum(heads, 0)
    parts: gl.constexpr = GROUPS // TOGETHER
    kv_head = heads // parts
    head = heads * TOGETHER
    row = gl.load(segment)
    q_start = gl.load(segment + 1)
    q_len = gl.where(there, gl.load(segment + 2), 0)
    k_start = gl.load(segment + 3)
    k_len = gl.where(there, gl.load(segment + 4), 0)
    offset = gl.load(segment + 5)
    window, sinks = 0, 0
    if WINDOW:
        window = gl.load(rules_ptr + 2 * kv_head)
        sinks = gl.load(rules_ptr + 2 * kv_head + 1)
    start, stop, all_start, all_stop = _keys_of(
        first + offset, gl.minimum(first + BLOCK_M, q_len) - 1 + offset, k_len, window, sinks, PART, CAUSAL, WINDOW
    )  # fmt: skip
    # pieces by the rule: those of the sinks before what all rows see, then both edges of the window
    of_sinks, of_left, apart = 0, 0, 0
    if WINDOW:
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
def _first_key(piece, tiles, WINDOW: gl.constexpr, PART: gl.constexpr):  # type: ignore[no-untyped-def]
    """Of a piece of an item: those at the edges come first."""
    of_sinks, left, edges, _total, start, all_start, all_stop, _stop = tiles
    tile_start = all_stop + (piece - left) * PART
    if WINDOW:
        tile_start = gl.where(piece < left, start + (piece - of_sinks) * PART, tile_start)
        tile_start = gl.where(piece < of_sinks, piece * PART, tile_start)
    return gl.where(piece < edges, tile_start, all_start + (piece - edges) * PART)


@gluon.jit
def _brought(tile_start, k_len, CLOSE: gl.constexpr, PART: gl.constexpr):  # type: ignore[no-untyped-def]
    """First key that is brought for a piece; with CLOSE the last piece is moved back to end with the keys.

    What lies after them may be of others, and what is not a number there would remain so by a weight of 0.
    """
    return gl.minimum(tile_start, gl.maximum(k_len - PART, 0)) if CLOSE else tile_start


@gluon.jit
def _bounds_of_piece(  # type: ignore[no-untyped-def]
    p, piece, tiles, rules, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CLOSE: gl.constexpr, PART: gl.constexpr
):  # fmt: skip
    """Each row's last key of a piece, and the one before its window; sinks end before `apart`, where others begin."""
    k_len, _offset, window, sinks, apart = rules
    n = _first_key(piece, tiles, WINDOW, PART)
    at = _brought(n, k_len, CLOSE, PART)
    limit = k_len
    if WINDOW:
        limit = gl.where(piece < tiles[0], apart, k_len)
    last, before, _sinks = bounds_of(p, at, limit, window, sinks, CAUSAL, WINDOW)
    own = n - 1 - at  # keys before its own, of a piece that was moved, are of the one before
    if WINDOW:
        before = gl.where(piece < tiles[0], own, gl.maximum(before, gl.maximum(apart - 1 - at, own)))
    elif CLOSE:
        before = gl.zeros_like(p) + own
    return last, before


@gluon.jit
def _bounds(  # type: ignore[no-untyped-def]
    p, t, tiles, rules, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CLOSE: gl.constexpr, BLOCK_N: gl.constexpr
):  # fmt: skip
    """The bounds of `seen` in an item's tile `t`."""
    PIECES: gl.constexpr = 2 if WINDOW else 1
    PART: gl.constexpr = BLOCK_N // PIECES
    last, before = _bounds_of_piece(p, PIECES * t, tiles, rules, CAUSAL, WINDOW, CLOSE, PART)
    if PIECES == 1:
        then = last - BLOCK_N // 2, before - BLOCK_N // 2
    else:
        then = _bounds_of_piece(p, PIECES * t + 1, tiles, rules, CAUSAL, WINDOW, CLOSE, PART)
    return last, before, then


@gluon.jit
def _produce(  # type: ignore[no-untyped-def]
    k_bulk, v_bulk, tables, k_ring, v_ring, GROUPS: gl.constexpr, TOGETHER: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr, CLOSE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fetches the tiles of all items into the rings."""
    count = 0
    following = _entry(tables, 0)
    for turn in range(0, _turns(tables)):
        entry, following = following, _entry(tables, turn + 1)
        place, rules, tiles = _item(tables, entry, GROUPS, TOGETHER, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)
        row, _q_start, _q_len, k_start, kv_head, _head, _first = place
        for t in range(0, tiles[3]):
            if WINDOW:
                PART: gl.constexpr = BLOCK_N // 2
                # a piece after what is seen brings the last one that is: what lies there may be of others
                most = (tiles[7] - 1) // PART * PART
                n = gl.minimum(_first_key(2 * t, tiles, True, PART), most)
                then = gl.minimum(_first_key(2 * t + 1, tiles, True, PART), most)
                n = k_start + _brought(n, rules[0], CLOSE, PART)
                then = k_start + _brought(then, rules[0], CLOSE, PART)
            else:
                n = k_start + _brought(_first_key(t, tiles, False, BLOCK_N), rules[0], CLOSE, BLOCK_N)
                then = n
            fetch(k_bulk, k_ring, count, row, kv_head, n, then, STAGES)
            fetch(v_bulk, v_ring, count, row, kv_head, n, then, STAGES)
            count += 1


@gluon.jit
def _begin_queries(  # type: ignore[no-untyped-def]
    q, q_ptr, strides, place, WHICH: gl.constexpr, TOGETHER: gl.constexpr, HEAD: gl.constexpr, LINES: gl.constexpr
):  # fmt: skip
    """Begins to bring the queries of an item that a group of warps computes."""
    row, q_start, q_len, _k_start, _kv_head, head, first = place
    if TOGETHER > 1:
        head += WHICH
    else:
        first += WHICH * ROWS
    i = first + gl.arange(0, ROWS, gl.SliceLayout(1, LINES))
    d = gl.arange(0, HEAD, gl.SliceLayout(0, LINES))
    q_rows = q_ptr + row.to(gl.int64) * strides[0] + head.to(gl.int64) * strides[1]
    q_rows += (q_start + i).to(gl.int64)[:, None] * strides[2]
    bring(q, q_rows + d[None, :], (i < q_len)[:, None])


@gluon.jit
def _consume(  # type: ignore[no-untyped-def]
    WHICH: gl.constexpr, tensors, tables, strides, scale, q_tiles, rings, GROUPS: gl.constexpr, TOGETHER: gl.constexpr,
    HEAD: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, HAS_SINK: gl.constexpr, HAS_LSE: gl.constexpr,
    GROUPS_OF_WARPS: gl.constexpr, ALTERNATE: gl.constexpr, AHEAD: gl.constexpr, CLOSE: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One group of warps: 64 queries of every item of the program, of a head of their own with TOGETHER.

    With AHEAD the queries of the next item come while this one is computed.
    """
    q_ptr, out_ptr, lse_ptr, sink_ptr = tensors
    _q_b, _q_h, _q_n, o_b, o_n, o_h, l_b, l_h = strides
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD, 16])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    # lines of 16 bytes a thread, as memory is read and written
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD, HEAD // 8], [4, 1], [1, 0])
    line = gl.arange(0, ROWS, gl.SliceLayout(1, LINES))
    d = gl.arange(0, HEAD, gl.SliceLayout(0, LINES))
    count = 0
    following = _entry(tables, 0)
    if AHEAD:
        place, _rules, _tiles = _item(tables, following, GROUPS, TOGETHER, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)
        _begin_queries(q_tiles.index(2 * WHICH), q_ptr, strides, place, WHICH, TOGETHER, HEAD, LINES)
    for turn in range(0, _turns(tables)):
        entry, following = following, _entry(tables, turn + 1)
        place, rules, tiles = _item(tables, entry, GROUPS, TOGETHER, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)
        if AHEAD:
            q_tile = q_tiles.index(2 * WHICH + turn % 2)
            bring_all()
            next_place, _rules, _tiles = _item(tables, following, GROUPS, TOGETHER, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)
            next_tile = q_tiles.index(2 * WHICH + (turn + 1) % 2)
            _begin_queries(next_tile, q_ptr, strides, next_place, WHICH, TOGETHER, HEAD, LINES)
        else:
            q_tile = q_tiles.index(WHICH)
            _begin_queries(q_tile, q_ptr, strides, place, WHICH, TOGETHER, HEAD, LINES)
            bring_all()
        row, q_start, q_len, _k_start, _kv_head, head, first = place
        _k_len, offset, _window, _sinks, _apart = rules
        edges = gl.cdiv(tiles[2], 2 if WINDOW else 1)
        total = tiles[3]
        if TOGETHER > 1:
            head += WHICH
        else:
            first += WHICH * ROWS
        row, head = row.to(gl.int64), head.to(gl.int64)
        i = first + line
        rows = first + gl.arange(0, ROWS, OF_ROWS)
        p = rows + offset
        row_max, row_sum = begin_rows(sink_ptr, head, HAS_SINK, OF_ROWS)
        acc = gl.zeros([ROWS, HEAD], gl.float32, O_LAYOUT)
        if total > 0:
            bounds = _bounds(p, 0, tiles, rules, CAUSAL, WINDOW, CLOSE, BLOCK_N)
            row_max, row_sum, pairs = first_tile(
                row_max, row_sum, q_tile, rings, count, scale, bounds, WINDOW or CLOSE, WHICH, GROUPS_OF_WARPS, ALTERNATE, BLOCK_N, STAGES,
                S_LAYOUT, dtype,
            )  # fmt: skip
            count += 1
            # one loop for both edges of a window: what runs once an item should be little code, which is fetched again
            for t in range(1, edges):
                bounds = _bounds(p, t, tiles, rules, CAUSAL, WINDOW, CLOSE, BLOCK_N)
                acc, row_max, row_sum, pairs = add_tile(
                    (acc, row_max, row_sum, pairs), q_tile, rings, count, scale, bounds, True, WINDOW or CLOSE, WHICH, GROUPS_OF_WARPS, ALTERNATE,
                    BLOCK_N, STAGES, S_LAYOUT, O_LAYOUT, dtype,
                )  # fmt: skip
                count += 1
            for _t in range(gl.maximum(edges, 1), total):
                acc, row_max, row_sum, pairs = add_tile(
                    (acc, row_max, row_sum, pairs), q_tile, rings, count, scale, None, False, False, WHICH, GROUPS_OF_WARPS, ALTERNATE,
                    BLOCK_N, STAGES, S_LAYOUT, O_LAYOUT, dtype,
                )  # fmt: skip
                count += 1
            acc = last_values(acc, pairs, rings[1], count - 1, BLOCK_N, STAGES, O_LAYOUT, dtype)
        out = out_ptr + row * o_b + head * o_h + (q_start + i).to(gl.int64)[:, None] * o_n + d[None, :]
        lse = lse_ptr + row * l_b + head * l_h + q_start + rows
        write_rows(acc, row_max, row_sum, out, (i < q_len)[:, None], lse, rows < q_len, HAS_LSE, LINES, O_LAYOUT, dtype)


@Launcher
@gluon.jit
def specialised(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, k_bulk, v_bulk, out_ptr, lse_ptr, sink_ptr, segments_ptr, work_ptr, rules_ptr,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, o_b, o_n, o_h, o_d, l_b, l_h, scale, softcap,
    GROUPS: gl.constexpr, TOGETHER: gl.constexpr, HEAD: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    HAS_SINK: gl.constexpr, HAS_LSE: gl.constexpr, GROUPS_OF_WARPS: gl.constexpr, ALTERNATE: gl.constexpr,
    AHEAD: gl.constexpr, CLOSE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Items of the work table, dealt out to the programs; arguments as of `forward`.

    An item is (segment, first row, number of its TOGETHER heads): 64 queries of these heads, one for each group of warps,
    or as many times 64 of one head. A program computes the items of its column of the table that `tables.deal_items` makes.
    With ALTERNATE the groups begin their products one after the other, with AHEAD queries are brought an item ahead. With
    CLOSE the keys of a segment may end within a tile and before the tensor does; then there are as many as a tile's piece
    at least. Heads have HEAD channels, which lie side by side; keys and values are only read by their descriptors, and
    scores have no softcap.
    """
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    BLOCK_M: gl.constexpr = 64 * GROUPS_OF_WARPS // TOGETHER
    q_tiles = gl.allocate_shared_memory(
        dtype,
        [GROUPS_OF_WARPS * (2 if AHEAD else 1), 64, HEAD],
        gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2),
    )
    k_ring = ring(k_bulk, BLOCK_N, HEAD, STAGES, GROUPS_OF_WARPS)
    v_ring = ring(v_bulk, BLOCK_N, HEAD, STAGES, GROUPS_OF_WARPS)
    turns = gl.allocate_shared_memory(gl.int64, [GROUPS_OF_WARPS, 1], mbarrier.MBarrierLayout())
    for which in gl.static_range(GROUPS_OF_WARPS):
        mbarrier.init(turns.index(which), count=1)
    tables = segments_ptr, work_ptr, rules_ptr
    strides = q_b, q_h, q_n, o_b, o_n, o_h, l_b, l_h
    rings = k_ring, v_ring, turns
    tensors = q_ptr, out_ptr, lse_ptr, sink_ptr
    # registers of a thread: the 65,536 of a multiprocessor less those of the copying warp, for the groups alike
    if GROUPS_OF_WARPS == 2:
        gl.warp_specialize(
            [
                (_consume, (0, tensors, tables, strides, scale, q_tiles, rings, GROUPS, TOGETHER, HEAD, CAUSAL, WINDOW, HAS_SINK, HAS_LSE, GROUPS_OF_WARPS, ALTERNATE, AHEAD, CLOSE, BLOCK_M, BLOCK_N, STAGES)),
                (_consume, (1, tensors, tables, strides, scale, q_tiles, rings, GROUPS, TOGETHER, HEAD, CAUSAL, WINDOW, HAS_SINK, HAS_LSE, GROUPS_OF_WARPS, ALTERNATE, AHEAD, CLOSE, BLOCK_M, BLOCK_N, STAGES)),
                (_produce, (k_bulk, v_bulk, tables, k_ring, v_ring, GROUPS, TOGETHER, CAUSAL, WINDOW, CLOSE, BLOCK_M, BLOCK_N, STAGES)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (0, tensors, tables, strides, scale, q_tiles, rings, GROUPS, TOGETHER, HEAD, CAUSAL, WINDOW, HAS_SINK, HAS_LSE, GROUPS_OF_WARPS, ALTERNATE, AHEAD, CLOSE, BLOCK_M, BLOCK_N, STAGES)),
                (_consume, (1, tensors, tables, strides, scale, q_tiles, rings, GROUPS, TOGETHER, HEAD, CAUSAL, WINDOW, HAS_SINK, HAS_LSE, GROUPS_OF_WARPS, ALTERNATE, AHEAD, CLOSE, BLOCK_M, BLOCK_N, STAGES)),
                (_consume, (2, tensors, tables, strides, scale, q_tiles, rings, GROUPS, TOGETHER, HEAD, CAUSAL, WINDOW, HAS_SINK, HAS_LSE, GROUPS_OF_WARPS, ALTERNATE, AHEAD, CLOSE, BLOCK_M, BLOCK_N, STAGES)),
                (_produce, (k_bulk, v_bulk, tables, k_ring, v_ring, GROUPS, TOGETHER, CAUSAL, WINDOW, CLOSE, BLOCK_M, BLOCK_N, STAGES)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )  # fmt: skip
