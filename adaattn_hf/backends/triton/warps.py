"""Parts of the warp-specialised kernel for Hopper: rings of tiles in shared memory, and one tile of online softmax.

The producer, one warp, brings tiles of keys and values by TMA into rings. The consumers, groups of four warps, 64 queries
each, multiply: the scores of a tile are begun before the values of the one before are added, so that the matrix unit works
while exponentials are taken (FlashAttention-3's forward; Shah et al. 2024, sections 3.1 and 3.2).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# up to Triton 3.7
_fetch = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_memory = gl.shared_memory_descriptor
_as = _memory.reinterpret if hasattr(_memory, "reinterpret") else _memory._reinterpret
ROWS = gl.constexpr(64)  # queries of a group of four warps
DESCRIPTOR = TensorDescriptor
TILE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
"""How TMA lays a tile `[1, 1, keys, channels]` of 16 bits down in shared memory."""


@gluon.jit
def ring(  # type: ignore[no-untyped-def]
    like, BLOCK_N: gl.constexpr, HEAD: gl.constexpr, STAGES: gl.constexpr, GROUPS_OF_WARPS: gl.constexpr
):  # fmt: skip
    """Shared memory for STAGES tiles, as boxes of a descriptor and whole, and two barriers a tile.

    The barriers tell that it has come, and that all groups are done with it. Boxes are tiles, or halves of their keys
    by 64 channels each; those of the first 64 channels come first, as the layout of a tile has it.
    """
    ROWS_OF_BOX: gl.constexpr = like.block_type.shape[2]
    CHANNELS_OF_BOX: gl.constexpr = like.block_type.shape[3]
    BOXES: gl.constexpr = BLOCK_N // ROWS_OF_BOX * (HEAD // CHANNELS_OF_BOX)
    boxes = gl.allocate_shared_memory(like.dtype, [STAGES * BOXES, 1, 1, ROWS_OF_BOX, CHANNELS_OF_BOX], like.layout)
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    tiles = _as(boxes, like.dtype, [STAGES, BLOCK_N, HEAD], LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS_OF_WARPS)
    return tiles, full, empty, boxes


@gluon.jit
def fetch(bulk, tiles_ring, count, row, kv_head, tile_start, second_start, STAGES: gl.constexpr):  # type: ignore[no-untyped-def]
    """Brings a tile as the `count`-th of a ring, once its place is free; its halves from two keys on."""
    tiles, full, empty, boxes = tiles_ring
    CHANNELS_OF_BOX: gl.constexpr = bulk.block_type.shape[3]
    HALVES: gl.constexpr = tiles.shape[1] // bulk.block_type.shape[2]
    BOXES: gl.constexpr = tiles.shape[2] // CHANNELS_OF_BOX * HALVES
    stage = count % STAGES
    mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(stage), BOXES * bulk.block_type.nbytes)
    for box in gl.static_range(BOXES):
        key = tile_start if box % HALVES == 0 else second_start
        at = [row, kv_head, key, box // HALVES * CHANNELS_OF_BOX]
        _fetch(bulk, at, full.index(stage), boxes.index(stage * BOXES + box))


@gluon.jit
def bring(tile, places, there):  # type: ignore[no-untyped-def]
    """Begins to copy numbers of 16 bits to shared memory, those that are there: 8 of a thread lie side by side."""
    _copy(tile, places, mask=there)
    async_copy.commit_group()


@gluon.jit
def bring_all():  # type: ignore[no-untyped-def]
    """Waits until what this group of warps brings has come for all of them, and the matrix unit may read it."""
    async_copy.wait_group(0)
    fence_async_shared()
    _barrier()


@gluon.jit
def begin_scores(  # type: ignore[no-untyped-def]
    q, rings, count, WHICH: gl.constexpr, ALTERNATE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Begins the products of queries with the `count`-th tile of keys; waits for it, and for this group's turn."""
    k_ring, _v_ring, turns = rings
    tiles, full, _empty, _boxes = k_ring
    stage = count % STAGES
    mbarrier.wait(full.index(stage), (count // STAGES) & 1)
    if ALTERNATE:
        # a fresh barrier counts as passed: the first group need not wait for its first turn
        mbarrier.wait(turns.index(WHICH), (count & 1) ^ (1 if WHICH == 0 else 0))
    keys = tiles.index(stage).permute([1, 0])
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, LAYOUT)
    return warpgroup_mma(q, keys, nothing, use_acc=False, is_async=True)


@gluon.jit
def bounds_of(p, tile_start, limit, window, sinks, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):  # type: ignore[no-untyped-def]
    """The bounds of `seen`, for queries that stand at `p` and a tile, of whose keys those below `limit` are there."""
    last = gl.zeros_like(p) + (limit - 1 - tile_start)
    if CAUSAL:
        last = gl.minimum(p - tile_start, last)
    elif WINDOW:
        last = gl.minimum(gl.maximum(p - tile_start + window, sinks - tile_start) - 1, last)
    return last, p - tile_start - window, sinks - tile_start


@gluon.jit
def seen(bounds, LEFT: gl.constexpr, BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Boolean `[rows, keys of a tile]`, by places in the tile: each row's last key, the one before its window, the sinks.

    Without LEFT all keys lie after where the windows begin. Instead of sinks there may be the other two bounds of the
    second half of the tile, by places in it.
    """
    last, before, more = bounds
    j = gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
    # a thread holds every eighth pair of a row: what is its own goes to the bounds, and places become constants
    pair = (j & 6)[None, :]
    place = (j & -7)[None, :]
    if LEFT and isinstance(more, gl.tuple):
        # one comparison for both ends: below the first one numbers without a sign are large
        then_last, then_before = more
        HALF: gl.constexpr = BLOCK_N // 2
        first = gl.where(place < HALF, (before + 1)[:, None] - pair, (then_before + 1 + HALF)[:, None] - pair)
        keys = gl.where(place < HALF, (last - before)[:, None], (then_last - then_before)[:, None])
        keep = (place - first).to(gl.uint32) < gl.maximum(keys, 0).to(gl.uint32)
    else:
        keep = place <= last[:, None] - pair
        if LEFT:
            keep = keep & ((place > before[:, None] - pair) | (place < more - pair))
    return keep


@gluon.jit
def weights_of(scores, row_max, row_sum, scale, SOME: gl.constexpr):  # type: ignore[no-untyped-def]
    """Weights of a tile of scores by the new maximum, that maximum, the new sum, and the factor of what came before.

    SOME: scores may be -inf.
    """
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale)
    shift = new_max
    if SOME:
        shift = gl.where(new_max == float("-inf"), 0.0, new_max)
    weights = gl.exp2(scores * scale - shift[:, None])
    rescale = gl.exp2(row_max - shift)
    return weights, new_max, row_sum * rescale + gl.sum(weights, 1), rescale


@gluon.jit
def paired(weights, BLOCK_N: gl.constexpr, dtype: gl.constexpr):  # type: ignore[no-untyped-def]
    """Weights in 16 bits, two in an int32: numbers of 16 bits would be taken apart and joined in every turn of a loop."""
    low, high = gl.split(weights.reshape([ROWS, BLOCK_N // 2, 2]))
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
        )
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _single(pairs, BLOCK_N: gl.constexpr, dtype: gl.constexpr, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """The weights of `paired` as the left side of a product."""
    both = gl.join(pairs.to(gl.int16), (pairs >> 16).to(gl.int16)).reshape([ROWS, BLOCK_N])
    return gl.convert_layout(both.to(dtype, bitcast=True), LAYOUT)


@gluon.jit
def _begin_values(acc, pairs, v_ring, count, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, LAYOUT: gl.constexpr, dtype: gl.constexpr):  # type: ignore[no-untyped-def] # fmt: skip
    """Begins to add the values of the `count`-th tile by their weights; waits for the tile."""
    tiles, full, _empty, _boxes = v_ring
    stage = count % STAGES
    mbarrier.wait(full.index(stage), (count // STAGES) & 1)
    weights = _single(pairs, BLOCK_N, dtype, gl.DotOperandLayout(operand_index=0, parent=LAYOUT, k_width=2))
    return warpgroup_mma(weights, tiles.index(stage), acc, is_async=True), weights


@gluon.jit
def add_tile(  # type: ignore[no-untyped-def]
    state, q, rings, count, scale, bounds, MASKED: gl.constexpr, LEFT: gl.constexpr, WHICH: gl.constexpr,
    GROUPS_OF_WARPS: gl.constexpr, ALTERNATE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """Takes the weights of the `count`-th tile while the values of the one before are added.

    `state` is output, maximum, sum and the weights that wait for their values.
    """
    acc, row_max, row_sum, pairs = state
    k_ring, v_ring, turns = rings
    scores = begin_scores(q, rings, count, WHICH, ALTERNATE, BLOCK_N, STAGES, S_LAYOUT)
    added, weights = _begin_values(acc, pairs, v_ring, count - 1, BLOCK_N, STAGES, O_LAYOUT, dtype)
    if ALTERNATE:
        mbarrier.arrive(turns.index((WHICH + 1) % GROUPS_OF_WARPS))
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(k_ring[2].index(count % STAGES))
    if MASKED:
        scores = gl.where(seen(bounds, LEFT, BLOCK_N, S_LAYOUT), scores, float("-inf"))
    new_weights, row_max, row_sum, rescale = weights_of(scores, row_max, row_sum, scale, MASKED)
    acc, weights = warpgroup_mma_wait(0, deps=[added, weights])
    mbarrier.arrive(v_ring[2].index((count - 1) % STAGES))
    acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, O_LAYOUT))[:, None]
    return acc, row_max, row_sum, paired(new_weights, BLOCK_N, dtype)


@gluon.jit
def first_tile(  # type: ignore[no-untyped-def]
    row_max, row_sum, q, rings, count, scale, bounds, LEFT: gl.constexpr, WHICH: gl.constexpr, GROUPS_OF_WARPS: gl.constexpr,
    ALTERNATE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, S_LAYOUT: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """The weights of an item's first tile: maximum, sum and weights, behind which no values wait."""
    k_ring, _v_ring, turns = rings
    scores = begin_scores(q, rings, count, WHICH, ALTERNATE, BLOCK_N, STAGES, S_LAYOUT)
    if ALTERNATE:
        mbarrier.arrive(turns.index((WHICH + 1) % GROUPS_OF_WARPS))
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(k_ring[2].index(count % STAGES))
    scores = gl.where(seen(bounds, LEFT, BLOCK_N, S_LAYOUT), scores, float("-inf"))
    weights, row_max, row_sum, _rescale = weights_of(scores, row_max, row_sum, scale, True)
    return row_max, row_sum, paired(weights, BLOCK_N, dtype)


@gluon.jit
def last_values(acc, pairs, v_ring, count, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, O_LAYOUT: gl.constexpr, dtype: gl.constexpr):  # type: ignore[no-untyped-def] # fmt: skip
    """Adds the values of an item's last tile, which is the `count`-th."""
    added, weights = _begin_values(acc, pairs, v_ring, count, BLOCK_N, STAGES, O_LAYOUT, dtype)
    acc, weights = warpgroup_mma_wait(0, deps=[added, weights])
    mbarrier.arrive(v_ring[2].index(count % STAGES))
    return acc


@gluon.jit
def begin_rows(sink_ptr, head, HAS_SINK: gl.constexpr, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Maximum and sum of rows that have seen nothing but their head's learned sink."""
    row_max = gl.full([ROWS], float("-inf"), gl.float32, LAYOUT)
    row_sum = gl.zeros([ROWS], gl.float32, LAYOUT)
    if HAS_SINK:
        row_max = gl.zeros([ROWS], gl.float32, LAYOUT) + gl.load(sink_ptr + head).to(gl.float32) * 1.4426950408889634
        row_sum += 1.0
    return row_max, row_sum


@gluon.jit
def write_rows(  # type: ignore[no-untyped-def]
    acc, row_max, row_sum, out, there, lse, own_there, HAS_LSE: gl.constexpr, LINES: gl.constexpr, O_LAYOUT: gl.constexpr,
    dtype: gl.constexpr,
):  # fmt: skip
    """Writes output and log-sum-exp of rows to where `out` `[rows, channels]` and `lse` `[rows]` point."""
    sums = gl.convert_layout(row_sum, gl.SliceLayout(1, O_LAYOUT))
    acc = acc * (1.0 / gl.where(sums == 0, 1.0, sums))[:, None]
    gl.store(out, gl.convert_layout(acc.to(dtype), LINES), mask=there)
    if HAS_LSE:
        gl.store(lse, (row_max + gl.log2(gl.where(row_sum == 0, 1.0, row_sum))) * 0.6931471805599453, mask=own_there)
