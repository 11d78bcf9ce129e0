"""Attention of many queries: a block of them over the keys that their head reads, with a window and sinks per head.

Below the kernel stands its launch, and on Hopper that of the one in `specialised`: with which constants and work tables.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...attention.call import AttentionCall, AttentionResult
from ...attention.heads import ALL, HeadWindows, head_windows
from ...attention.kind import GRAD, LSE, SINKS, SOFTCAP, CallKind
from ...attention.structure import MaskStructure
from ..base import derived_on
from .launch import Launcher, aligned, descriptor_of, device_facts
from .tables import Blocking, ends_with_tiles, find_entries, find_items, pairs_seen, runs_of, window_table
from .tiles import capped, edge_tile, edges_of, entry_of, keys_of, rows_of, step, visible
from .tiling import fitting_tile, padded, pays, scale_of, warps_of

# Products of numbers from which on keys and values are read by TMA. Smaller calls gain less by it (4 to 6 us on an H200
# at 5e9) than the host takes to describe keys and values (some 15 us).
_LEAST_PRODUCTS = 1 << 33


@Launcher
@triton.jit
def forward(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, k_bulk, v_bulk, out_ptr, lse_ptr, sink_ptr, segments_ptr, work_ptr, rules_ptr,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, o_b, o_n, o_h, o_d, l_b, l_h,
    scale, softcap,
    GROUPS: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, PAD: tl.constexpr, PAD_V: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINK: tl.constexpr, HAS_LSE: tl.constexpr,
    BULK: tl.constexpr, EDGES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head; programs are entries of the work table, each for all query heads of its group.

    An entry is (segment, first query, key/value head); `rules` holds each key/value head's window and sinks. With BULK
    TMA brings the tiles that all queries of a block see, and with EDGES the others, too, whose keys then end with a tile
    or with the tensor: `k_bulk` and `v_bulk` are descriptors of the keys and values.
    """
    row_number, q_start, q_len, k_start, k_len, offset, first, kv_head, window, sinks = entry_of(
        work_ptr, segments_ptr, rules_ptr, tl.program_id(0) // GROUPS, WINDOW
    )
    head = (kv_head * GROUPS + tl.program_id(0) % GROUPS).to(tl.int64)
    row = row_number.to(tl.int64)

    i = first + tl.arange(0, BLOCK_M)
    p = i + offset
    d = tl.arange(0, PAD)
    dv = tl.arange(0, PAD_V)
    q_base = q_ptr + row * q_b + head * q_h + q_start.to(tl.int64) * q_n
    q_tile = rows_of(q_base, i, d, q_n, q_d, q_len, DIM, PAD, False)
    k_base = k_ptr + row * k_b + kv_head.to(tl.int64) * k_h + k_start.to(tl.int64) * k_n
    v_base = v_ptr + row * v_b + kv_head.to(tl.int64) * v_h + k_start.to(tl.int64) * v_n

    start, stop, all_start, all_stop = keys_of(
        first + offset, tl.minimum(first + BLOCK_M, q_len) - 1 + offset, k_len, window, sinks, BLOCK_N, CAUSAL, WINDOW
    )  # fmt: skip

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINK:
        row_max = tl.full([BLOCK_M], 0.0, tl.float32) + tl.load(sink_ptr + head).to(tl.float32) * 1.4426950408889634
        row_sum += 1.0
    acc = tl.zeros([BLOCK_M, PAD_V], tl.float32)

    of_sinks, of_left, of_right = edges_of(start, stop, all_start, all_stop, sinks, BLOCK_N, WINDOW)
    for tile in range(0, of_sinks + of_left + of_right):
        tile_start, limit = edge_tile(tile, of_sinks, of_left, start, all_stop, k_len, sinks, BLOCK_N, WINDOW)
        j = tile_start + tl.arange(0, BLOCK_N)
        if EDGES:
            k_tile = k_bulk.load([row_number, kv_head, k_start + tile_start, 0]).reshape(BLOCK_N, PAD).T
            v_tile = v_bulk.load([row_number, kv_head, k_start + tile_start, 0]).reshape(BLOCK_N, PAD_V)
        else:
            k_tile = rows_of(k_base, j, d, k_n, k_d, limit, DIM, PAD, False, TURNED=True)
            v_tile = rows_of(v_base, j, dv, v_n, v_d, limit, DIM_V, PAD_V, False)
        seen = visible(p, j, limit, window, sinks, CAUSAL, WINDOW)
        scores = tl.dot(q_tile, k_tile, input_precision="ieee")
        if HAS_CAP:
            scores = capped(scores * scale, softcap, HAS_CAP)
        scores = tl.where(seen, scores, float("-inf"))
        acc, row_max, row_sum = step(acc, row_max, row_sum, scores, v_tile, scale, SCALE=not HAS_CAP, HIDDEN=True)
    for tile_start in range(all_start, all_stop, BLOCK_N):
        j = tile_start + tl.arange(0, BLOCK_N)
        if BULK:
            k_tile = k_bulk.load([row_number, kv_head, k_start + tile_start, 0]).reshape(BLOCK_N, PAD).T
            v_tile = v_bulk.load([row_number, kv_head, k_start + tile_start, 0]).reshape(BLOCK_N, PAD_V)
        else:
            k_tile = rows_of(k_base, j, d, k_n, k_d, k_len, DIM, PAD, True, TURNED=True)
            v_tile = rows_of(v_base, j, dv, v_n, v_d, k_len, DIM_V, PAD_V, True)
        scores = tl.dot(q_tile, k_tile, input_precision="ieee")
        if HAS_CAP:
            scores = capped(scores * scale, softcap, HAS_CAP)
        acc, row_max, row_sum = step(acc, row_max, row_sum, scores, v_tile, scale, SCALE=not HAS_CAP, HIDDEN=False)

    acc = acc / tl.where(row_sum == 0, 1.0, row_sum)[:, None]
    o_rows = out_ptr + row * o_b + head * o_h + (q_start + i).to(tl.int64)[:, None] * o_n
    tl.store(
        o_rows + dv[None, :] * o_d, acc.to(out_ptr.dtype.element_ty), mask=(i < q_len)[:, None] & (dv < DIM_V)[None, :]
    )
    if HAS_LSE:
        lse = (row_max + tl.log2(tl.where(row_sum == 0, 1.0, row_sum))) * 0.6931471805599453
        tl.store(lse_ptr + row * l_b + head * l_h + q_start + i, lse, mask=i < q_len)


class Launch(NamedTuple):
    """One launch of a call.

    Attributes:
        tables: Runs, entries or items, windows.
        constants: Of the kernel, and the compiler's options, as it reads keys and values by addresses.
        by_tma: The same as it reads them by TMA; None where that does not pay.
        box: Keys and channels that TMA brings at once; all channels where None.
        specialised: Whether it is the kernel for Hopper, which only reads by TMA.
    """

    kernel: Launcher
    grid: tuple[int, ...]
    tables: tuple[Tensor, Tensor, Tensor]
    constants: dict[str, Any]
    by_tma: dict[str, Any] | None
    box: tuple[int, int | None]
    specialised: bool = False


def attend_forward(call: AttentionCall, kind: CallKind) -> AttentionResult:
    """Attention of many queries, in one launch over all runs and heads, or two.

    The log-sum-exp is there where the kind asks for it, or for gradients.
    """
    if call.scaling < 0:  # the kernels take the largest score by the largest product
        call = call.with_positive_scaling()
    query, key, value, structure = call.query, call.key, call.value, call.structure
    windows, softcap, sink = head_windows(structure, call.per_head, key.shape[1]), call.softcap, call.sink_logits
    batch, heads, q_len, _ = query.shape
    out = query.new_empty((batch, q_len, heads, value.shape[3]))
    lse = query.new_empty((batch, heads, q_len), dtype=torch.float32) if kind.features & (LSE | GRAD) else None
    even = aligned(query, key, value)
    strides = query.stride(), key.stride(), value.stride()
    # the kernel for Hopper reads queries in lines of 16 bytes
    lines = even and strides[0][3] == 1 and not any(step % 16 for step in strides[0][:3])
    launches = derived_on(structure, query.device, find_launches, kind, windows, lines)
    bulk = _descriptors(launches, key, value) if even else None
    if bulk is None and launches and launches[0].specialised:
        launches = derived_on(structure, query.device, find_launches, kind, windows, False)
        bulk = _descriptors(launches, key, value) if even else None
    numbers = (
        *strides[0], *strides[1], *strides[2], *out.stride(), *((0, 0) if lse is None else lse.stride()[:2]),
        scale_of(call.scaling, softcap), float(softcap or 0.0),
    )  # fmt: skip
    # learned sinks come from elsewhere, and begin at any address
    variant = (query.dtype, numbers[:-2]) if even and sink is None else None
    last = (out, out if lse is None else lse, out if sink is None else sink)
    for launch in launches:
        keys, values, constants = key, value, launch.constants
        if bulk is not None and launch.by_tma is not None:
            (keys, values), constants = bulk, launch.by_tma
        launch.kernel(
            launch.grid, (query, key, value, keys, values, *last, *launch.tables, *numbers), constants, variant
        )
    return AttentionResult(out, lse)


def _descriptors(launches: Sequence[Launch], key: Tensor, value: Tensor) -> tuple[Any, Any] | None:
    """TMA descriptors for the first launch; None where it reads by addresses, or TMA cannot take the tensors."""
    if not launches or launches[0].by_tma is None:
        return None
    keys, values = (descriptor_of(tensor, *launches[0].box, gluon=launches[0].specialised) for tensor in (key, value))
    return None if keys is None or values is None else (keys, values)


def find_launches(
    structure: MaskStructure, device: torch.device, kind: CallKind, windows: HeadWindows | None, on_hopper: bool
) -> tuple[Launch, ...]:
    """The launches of all calls of a kind over a structure; one that is not made of runs is refused.

    `windows` are those of `head_windows`; `on_hopper` lets the kernel for Hopper be among the launches.
    """
    if structure.segments() is None:  # under torch.jit.trace nobody looks at the padding before
        raise ValueError("structure: a dense mask or padding with holes, expected runs; use the sdpa backend")
    heavy = _is_heavy(kind, pairs_seen(structure, windows or ((ALL, 0),) * kind.kv_heads))
    specialised = on_hopper and heavy and device_facts(device).specialised
    launches = _launches_on_hopper(structure, device, kind, windows) if specialised else ()
    return launches or _plain_launch(structure, device, kind, windows, heavy, Blocking("queries", 0))


def _is_heavy(kind: CallKind, pairs: int) -> bool:
    """Whether heads that see so many pairs of queries and keys compute so much that TMA pays."""
    return pairs * kind.groups * (kind.head_dim + kind.head_dim_v) >= _LEAST_PRODUCTS


def _constants(structure: MaskStructure, kind: CallKind, windows: HeadWindows | None) -> dict[str, Any]:
    """What both kernels are compiled for."""
    return {
        "GROUPS": kind.groups, "CAUSAL": structure.causal, "WINDOW": windows is not None,
        "HAS_SINK": bool(kind.features & SINKS), "HAS_LSE": bool(kind.features & (LSE | GRAD)),
    }  # fmt: skip


def _plain_launch(
    structure: MaskStructure, device: torch.device, kind: CallKind, windows: HeadWindows | None, heavy: bool,
    cut: Blocking,
) -> tuple[Launch, ...]:  # fmt: skip
    """The launch of the kernel for all devices over the runs of a cut; none where there are no queries."""
    pad, pad_v = padded(kind.head_dim), padded(kind.head_dim_v)
    name = "forward" if windows is None else "forward of windows"
    tile = fitting_tile(name, max(pad, pad_v) * kind.dtype.itemsize, device_facts(device).memory)
    constants = _constants(structure, kind, windows) | {
        "DIM": kind.head_dim, "DIM_V": kind.head_dim_v, "PAD": pad, "PAD_V": pad_v,
        "HAS_CAP": bool(kind.features & SOFTCAP), "BULK": False, "EDGES": False, **tile.constants(),
    }  # fmt: skip
    runs, entries = derived_on(structure, device, find_entries, cut._replace(block=tile.rows), kind.kv_heads)
    if not len(entries):
        return ()
    by_tma = None
    if heavy:
        closed = all(ends_with_tiles(run, tile.columns, structure.kv_len) for run in structure.segments() or ())
        by_tma = {**constants, "BULK": True, "EDGES": closed}
    tables = runs, entries, entries if windows is None else window_table(windows, device)
    grid = (kind.groups * len(entries),)
    return (Launch(forward, grid, tables, constants, by_tma, (tile.columns, None)),)


def _launches_on_hopper(
    structure: MaskStructure, device: torch.device, kind: CallKind, windows: HeadWindows | None
) -> tuple[Launch, ...]:
    """The launch of the kernel for Hopper, and one for runs of fewer keys than a tile; empty where it does not pay.

    Tiles of such runs would reach into others.
    """
    by_head = windows or ((ALL, 0),) * kind.kv_heads
    warps = warps_of(kind, windows is not None)
    if warps is None:
        return ()
    keys = warps.part
    runs = structure.cached(runs_of, keys)
    pairs, queries = pairs_seen(structure, by_head, keys), sum(run.q_len for run in runs) * kind.kv_heads
    # as many programs as are resident at once compute all items, which hides how each begins and ends
    programs = device_facts(device).processors
    if not runs or not _is_heavy(kind, pairs) or not pays(warps, pairs, queries, programs):
        return ()
    from .specialised import specialised  # Gluon is younger than the oldest Triton that is served

    closed = all(ends_with_tiles(run, keys, structure.kv_len) for run in runs)
    runs_table, items, programs = derived_on(structure, device, find_items, warps, by_head, programs)
    tables = runs_table, items, items if windows is None else window_table(windows, device)
    constants = _constants(structure, kind, windows) | {
        "TOGETHER": warps.together, "HEAD": kind.head_dim, "GROUPS_OF_WARPS": warps.groups,
        "ALTERNATE": warps.alternate, "AHEAD": warps.ahead, "CLOSE": not closed, "BLOCK_N": warps.keys,
        "STAGES": warps.stages, "num_warps": 4,
    }  # fmt: skip
    launch = Launch(
        specialised, (programs,), tables, constants, constants, (keys, None if windows is None else 64), True
    )
    if not structure.cached(runs_of, keys, True):
        return (launch,)
    return (launch, *_plain_launch(structure, device, kind, windows, False, Blocking("queries", 0, keys, short=True)))
