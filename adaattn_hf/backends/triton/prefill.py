"""Many queries per sequence: which kernels serve a call, with which constants and work tables, and their launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...attention.heads import HeadWindows
from ...attention.request import AttentionRequest, AttentionResult, other_devices
from ...attention.structure import CallStructure
from ..base import derived_on
from . import hopper
from .descriptors import descriptor_of
from .forward import forward
from .launcher import Launcher, aligned
from .sizes import padded, processors, scale_of, tile_on
from .tables import (
    Cut,
    Dealing,
    ends_with_tiles,
    exact_windows,
    find_entries,
    find_items,
    pairs_seen,
    runs_of,
    window_table,
)

launch_forward = Launcher(forward)

# Products of numbers from which on keys and values are read by TMA. Smaller calls gain less by it (4 to 6 us on an H200
# at 5e9) than the host takes to describe keys and values (some 15 us).
_LEAST_PRODUCTS = 1 << 33
_WHOLE = Cut("queries", 0)


class Kind(NamedTuple):
    """What kernels are compiled for, besides windows and runs: numbers of heads and channels, options of the scores."""

    heads: int
    kv_heads: int
    dim: int
    dim_v: int
    dtype: torch.dtype
    softcap: float | None = None
    has_sink: bool = False
    has_lse: bool = False

    def facts(self, causal: bool, windowed: bool) -> dict[str, Any]:
        """The constants that all kernels share."""
        return {
            "GROUPS": self.heads // self.kv_heads, "CAUSAL": causal, "WINDOW": windowed, "HAS_SINK": self.has_sink,
            "HAS_LSE": self.has_lse,
        }  # fmt: skip


class Part(NamedTuple):
    """One launch of a call.

    Attributes:
        tables: Runs, entries or items, windows.
        constants: Of the kernel, and the compiler's options, as it reads keys and values by addresses.
        by_tma: The same as it reads them by TMA; None where that does not pay.
        box: Keys and channels that TMA brings at once; all channels where None.
        specialised: Whether it is the warp-specialised kernel for Hopper, which only reads by TMA.
    """

    launcher: Launcher
    grid: tuple[int, ...]
    tables: tuple[Tensor, Tensor, Tensor]
    constants: dict[str, Any]
    by_tma: dict[str, Any] | None
    box: tuple[int, int | None]
    specialised: bool = False


def find_parts(
    structure: CallStructure, device: torch.device, kind: Kind, windows: HeadWindows | None, on_hopper: bool
) -> tuple[Part, ...]:
    """The launches of all calls of a kind over a structure; one that is not made of runs is refused.

    `windows` are those of `head_windows`; `on_hopper` lets the kernel for Hopper be among the launches.
    """
    if structure.segments() is None:
        raise ValueError("structure: a dense mask or padding with holes, expected runs; use the sdpa backend")
    every = windows or exact_windows(kind.kv_heads)
    heavy = _is_heavy(kind, pairs_seen(structure, every))
    if on_hopper and heavy and kind.dim == kind.dim_v and kind.softcap is None and hopper.usable(device):
        found = _parts_on_hopper(structure, device, kind, windows)
        if found:
            return found
    return _plain_part(structure, device, kind, windows, heavy)


def _is_heavy(kind: Kind, pairs: int) -> bool:
    """Whether heads that see so many pairs of queries and keys compute so much that TMA pays."""
    return pairs * kind.heads // kind.kv_heads * (kind.dim + kind.dim_v) >= _LEAST_PRODUCTS


def _plain_part(
    structure: CallStructure,
    device: torch.device,
    kind: Kind,
    windows: HeadWindows | None,
    heavy: bool,
    cut: Cut = _WHOLE,
) -> tuple[Part, ...]:
    """The launch of the kernel for all devices over the runs of a cut; none where there are no queries."""
    width = max(padded(kind.dim), padded(kind.dim_v)) * kind.dtype.itemsize
    tile = tile_on("forward" if windows is None else "forward of windows", width, device)
    constants = kind.facts(structure.causal, windows is not None) | {
        "DIM": kind.dim, "DIM_V": kind.dim_v, "PAD": padded(kind.dim), "PAD_V": padded(kind.dim_v),
        "HAS_CAP": kind.softcap is not None, "BULK": False, "EDGES": False, **tile.constants(),
    }  # fmt: skip
    runs, entries = derived_on(structure, device, find_entries, cut._replace(block=tile.rows), kind.kv_heads)
    if not len(entries):
        return ()
    by_tma = None
    if heavy:
        closed = all(ends_with_tiles(run, tile.columns, structure.kv_len) for run in structure.segments() or ())
        by_tma = {**constants, "BULK": True, "EDGES": closed}
    tables = runs, entries, entries if windows is None else window_table(windows, device)
    grid = (kind.heads // kind.kv_heads * len(entries),)
    return (Part(launch_forward, grid, tables, constants, by_tma, (tile.columns, None)),)


def _parts_on_hopper(
    structure: CallStructure, device: torch.device, kind: Kind, windows: HeadWindows | None
) -> tuple[Part, ...]:
    """The launch of the kernel for Hopper, and one for runs of fewer keys than a tile; empty where it does not pay.

    Tiles of such runs would reach into others.
    """
    groups, every = kind.heads // kind.kv_heads, windows or exact_windows(kind.kv_heads)
    warps = hopper.warps_of(kind.dim, groups, windows is not None)
    if warps is None:
        return ()
    pieces = 1 if windows is None else 2
    keys = warps.columns // pieces
    cut = Cut("queries", warps.rows, least=keys)
    runs = structure.derived(runs_of, keys)
    pairs, queries = pairs_seen(structure, every, keys), sum(run.q_len for run in runs) * kind.kv_heads
    # as many programs as are resident at once compute all items, which hides how each begins and ends
    programs = processors(device)
    if not runs or not _is_heavy(kind, pairs) or not warps.pays(pairs, queries, groups, programs):
        return ()
    closed = all(ends_with_tiles(run, keys, structure.kv_len) for run in runs)
    constants = kind.facts(structure.causal, windows is not None) | {
        "HEAD": kind.dim, "TOGETHER": warps.together, "GROUPS_OF_WARPS": warps.groups, "ALTERNATE": warps.alternate,
        "AHEAD": warps.ahead, "CLOSE": not closed, "BLOCK_N": warps.columns, "STAGES": warps.stages, "num_warps": 4,
    }  # fmt: skip
    dealing = Dealing(groups // warps.together, keys, pieces, programs)
    runs_table, items, dealt = derived_on(structure, device, find_items, cut, dealing, every)
    tables = runs_table, items, items if windows is None else window_table(windows, device)
    box = keys, None if windows is None else 64
    part = Part(hopper.launch_specialised(), (dealt,), tables, constants, constants, box, True)
    if not structure.derived(runs_of, keys, True):
        return (part,)
    return (part, *_plain_part(structure, device, kind, windows, False, cut._replace(short=True)))


def run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    structure: CallStructure,
    scaling: float,
    windows: HeadWindows | None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    with_lse: bool = False,
) -> AttentionResult:
    """Attention of many queries, in one launch over all runs and heads, or two; tensors on several devices are refused.

    Tensors are `[batch, heads, length, head_dim]`, learned sinks `[heads]`, windows those of `head_windows`.
    """
    if not query.get_device() == key.get_device() == value.get_device():
        raise other_devices(query, key, value)
    if scaling < 0:
        query, scaling = -query, -scaling  # the kernels take the largest score by the largest product
    batch, heads, q_len, dim = query.shape
    device, dtype = query.device, query.dtype
    out = query.new_empty((batch, q_len, heads, value.shape[3]))
    lse = query.new_empty((batch, heads, q_len), dtype=torch.float32) if with_lse else None
    kind = Kind(heads, key.shape[1], dim, value.shape[3], dtype, softcap, sink is not None, with_lse)
    even = aligned(query, key, value)
    strides = query.stride(), key.stride(), value.stride()
    # the kernel for Hopper reads queries in lines of 16 bytes
    lines = even and strides[0][3] == 1 and not any(step % 16 for step in strides[0][:3])
    parts = derived_on(structure, device, find_parts, kind, windows, lines)
    bulk = _descriptors(parts, key, value) if even else None
    if bulk is None and parts and parts[0].specialised:
        parts = derived_on(structure, device, find_parts, kind, windows, False)
        bulk = _descriptors(parts, key, value) if even else None
    numbers = (
        *strides[0], *strides[1], *strides[2], *out.stride(), *((0, 0) if lse is None else lse.stride()[:2]),
        scale_of(scaling, softcap), float(softcap or 0.0),
    )  # fmt: skip
    # learned sinks come from elsewhere, and begin at any address
    variant = (dtype, numbers[:-2]) if even and query.is_cuda and sink is None else None
    last = (out, out if lse is None else lse, out if sink is None else sink)
    for part in parts:
        keys, values, constants = key, value, part.constants
        if bulk is not None and part.by_tma is not None:
            (keys, values), constants = bulk, part.by_tma
        part.launcher(part.grid, (query, key, value, keys, values, *last, *part.tables, *numbers), constants, variant)
    return AttentionResult(out, lse)


def _descriptors(parts: Sequence[Part], key: Tensor, value: Tensor) -> tuple[Any, Any] | None:
    """TMA descriptors for the first launch; None where it reads by addresses, or TMA cannot take the tensors."""
    if not parts or parts[0].by_tma is None:
        return None
    keys, values = (descriptor_of(one, *parts[0].box, gluon=parts[0].specialised) for one in (key, value))
    return None if keys is None or values is None else (keys, values)


def attend_forward(request: AttentionRequest, windows: HeadWindows | None, keep_lse: bool = False) -> AttentionResult:
    """The same of a request; `keep_lse` makes the log-sum-exp for the backward pass."""
    return run(
        request.query, request.key, request.value, request.structure, request.scaling, windows, request.softcap,
        request.sink_logits, request.need_lse or keep_lse,
    )  # fmt: skip
