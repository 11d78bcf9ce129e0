"""The launch of many queries per sequence: tables, tile sizes, output."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...attention.request import AttentionRequest, AttentionResult
from ...attention.structure import Segment
from ..capability import capability
from ..windows import HeadWindows
from .again import Launcher, aligned
from .forward import forward
from .sizes import Tile, padded, scale_of
from .tables import work_of

launch_forward = Launcher(forward)

# Whether the copy engine brings tiles at the edges of what queries see, where it can.
_BULK_EDGES = True


def blank(request: AttentionRequest, need_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Output and log-sum-exp to write into, every row of them."""
    query = request.query
    batch, heads, q_len, _ = query.shape
    out = query.new_empty((batch, q_len, heads, request.value.shape[3]))
    return out, query.new_empty((batch, heads, q_len), dtype=torch.float32) if need_lse else None


def forward_tile(pad: int, windows: bool) -> Tile:
    """For a head size; on an H200 two small programs per multiprocessor beat one large program.

    Heads of up to 64 channels without windows are the exception: a block of queries of a narrow window reads few tiles,
    of which the larger ones hold more that nobody sees.
    """
    if pad <= 64:
        return Tile(64, 64, 4, 3) if windows else Tile(128, 64, 8, 3)
    if pad <= 128:
        return Tile(64, 64, 4, 3)
    return Tile(64, 32, 4, 2)


@functools.cache
def _descriptors() -> Any:
    """Triton's tensor descriptors, None in versions that have none."""
    if importlib.util.find_spec("triton.tools.tensor_descriptor") is None:
        return None
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor


@functools.cache
def _copies_tiles(device: torch.device) -> bool:
    """Whether the device has an engine that copies tiles (Hopper and later)."""
    facts = capability(device) if device.type == "cuda" else None
    return device.type != "cuda" or (facts is not None and facts.tiles)


def bulk_of(tensor: Tensor, rows: int, columns: int | None = None) -> Any:
    """A descriptor of tiles `[1, 1, rows, columns]` of a tensor, None where the copy engine cannot take them.

    Args:
        tensor: `[batch, heads, length, width]`.
        rows: Of a tile.
        columns: Of a tile; all of them when absent.
    """
    width = tensor.shape[3]
    size = tensor.element_size()
    if (
        size != 2
        or width != padded(width)
        or width < 32
        or _descriptors() is None
        or not _copies_tiles(tensor.device)
    ):
        return None
    strides = tensor.stride()
    if strides[3] != 1 or any(s * size % 16 or not s for s in strides[:3]) or tensor.data_ptr() % 16:
        return None
    return _descriptors()(tensor, list(tensor.shape), list(strides), [1, 1, rows, columns or width])


def attend_forward(
    request: AttentionRequest,
    segments: Sequence[Segment],
    windows: HeadWindows | None,
    keep_lse: bool = False,
) -> AttentionResult:
    """One launch over all segments and heads; `keep_lse` makes the log-sum-exp for the backward pass."""
    query, key, value, structure = request.query, request.key, request.value, request.structure
    if request.scaling < 0:
        query = -query  # the kernels take the largest score by the largest product
    heads, dim, value_dim = query.shape[1], query.shape[3], value.shape[3]
    out, lse = blank(request, request.need_lse or keep_lse)
    tile = forward_tile(max(padded(dim), padded(value_dim)), windows is not None)
    kv_heads = key.shape[1]
    work = work_of(
        "queries",
        structure,
        segments,
        windows,
        kv_heads,
        (tile.rows, tile.columns),
        query.device,
        silent=True,
    )
    sink = request.sink_logits
    k_bulk, v_bulk = bulk_of(key, tile.columns), bulk_of(value, tile.columns)
    bulk = k_bulk is not None and v_bulk is not None
    tensors = (
        query, key, value, k_bulk if bulk else key, v_bulk if bulk else value, out, lse if lse is not None else out,
        sink if sink is not None else out, work.segments,
    )  # fmt: skip
    rest = (
        work.rules, *query.stride(), *key.stride(), *value.stride(), *out.stride(),
        *(lse.stride()[:2] if lse is not None else (0, 0)),
        abs(scale_of(request.scaling, request.softcap)), float(request.softcap or 0.0),
    )  # fmt: skip
    constants = {
        "GROUPS": heads // kv_heads, "DIM": dim, "DIM_V": value_dim, "PAD": padded(dim), "PAD_V": padded(value_dim),
        "CAUSAL": structure.causal, "WINDOW": windows is not None, "HAS_CAP": request.softcap is not None,
        "HAS_SINK": sink is not None, "HAS_LSE": lse is not None, "BULK": bulk,
        "EDGES": bulk and work.ends and _BULK_EDGES, "BLOCK_M": tile.rows, "BLOCK_N": tile.columns,
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip
    kind = None
    if query.is_cuda and sink is None and aligned(query, key, value):
        kind = (
            query.dtype, key.dtype, value.dtype, query.stride(), key.stride(), value.stride(), out.stride(),
            None if lse is None else lse.stride(), aligned(work.entries), aligned(work.rules),
        )  # fmt: skip
    for entries in work.launches():
        launch_forward((heads // kv_heads, entries.shape[0]), (*tensors, entries, *rest), constants, kind)
    return AttentionResult(out, lse)
