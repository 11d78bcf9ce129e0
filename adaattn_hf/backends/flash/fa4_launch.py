"""Launches of flash-attn 4: dense, over packed segments, and over lists of blocks with a window per head."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch
from torch import Tensor

from ...attention.request import AttentionRequest, AttentionResult
from ...attention.structure import CallStructure
from ..windows import ALL, HeadWindows, head_windows
from .fa4_lists import Blocks, Runs, blocks_of, lists, runs_of
from .variants import attend_packed

__all__ = ["attend"]


# its compiler says so of every mask that it cannot take as a launch's argument, and compiles it in
warnings.filterwarnings("ignore", "Argument aux_data", UserWarning)


def _kernels() -> Any:
    """The package, imported with the first call."""
    return importlib.import_module("flash_attn.cute")


def attend(request: AttentionRequest) -> AttentionResult:
    """One launch: dense, over packed segments, or over lists of blocks."""
    kernels = _kernels()
    structure = request.structure
    windows = head_windows(structure, request.per_head, request.key.shape[1])
    alike = windows is None or (len(set(windows)) == 1 and not windows[0][1])
    if not alike and windows is not None:
        return _listed(request, windows)
    if structure.kind == "ragged":
        return AttentionResult(
            attend_packed(request, kernels.flash_attn_varlen_func, _arguments(request, windows))
        )
    kv_len = structure.kv_len
    if structure.causal:
        # the kernels align causality to the last key: cut the keys behind the last query
        kv_len = min(kv_len, structure.offset() + structure.q_len)
    out, lse = kernels.flash_attn_func(
        request.query.transpose(1, 2),
        request.key[:, :, :kv_len].transpose(1, 2),
        request.value[:, :, :kv_len].transpose(1, 2),
        **_arguments(request, windows),
    )
    return AttentionResult(out, lse if request.need_lse else None)


def _listed(request: AttentionRequest, windows: HeadWindows) -> AttentionResult:
    """Heads of different windows, or sinks beside a window: blocks by lists, their borders by a mask."""
    structure, groups = request.structure, request.query.shape[1] // request.key.shape[1]
    plain = structure.plain and (structure.causal or structure.offset() == 0)
    kv_len = structure.kv_len
    if plain and structure.causal:
        kv_len = min(kv_len, structure.offset() + structure.q_len)
    made = _made(structure, windows, groups, kv_len, plain, request.query.device)
    masks = importlib.import_module(f"{__package__}.fa4_mask")
    name = "causal" if structure.causal else "both_ways"
    listing = importlib.import_module("flash_attn.cute.block_sparsity").BlockSparseTensorsTorch
    arguments = _arguments(request, None) | {"causal": False, "pack_gqa": False}
    if request.query.requires_grad or request.key.requires_grad or request.value.requires_grad:
        arguments["block_sparse_tensors_bwd"] = listing(*made.turned(groups), block_size=(128, 128))
    out, lse = _kernels().flash_attn_func(
        request.query.transpose(1, 2),
        request.key[:, :, :kv_len].transpose(1, 2),
        request.value[:, :, :kv_len].transpose(1, 2),
        mask_mod=getattr(masks, name if plain else f"{name}_runs"),
        aux_tensors=made.tables,
        block_sparse_tensors=listing(*made.lists, block_size=(128, 128)),
        **arguments,
    )
    return AttentionResult(out, lse if request.need_lse else None)


class _Made:
    """Lists and tables of a structure and windows; the lists by blocks of keys follow when a gradient asks for them."""

    def __init__(self, blocks: Blocks, tables: list[Tensor], groups: int) -> None:
        """From the blocks that are visible."""
        self._blocks = blocks
        self._turned: tuple[Tensor, ...] | None = None
        self.tables = tables
        self.lists = lists(blocks, groups)

    def turned(self, groups: int) -> tuple[Tensor, ...]:
        """Lists of blocks of queries for every block of keys."""
        if self._turned is None:
            some, every = self._blocks
            self._turned = lists(Blocks(some.transpose(2, 3), every.transpose(2, 3)), groups)
        return self._turned


def _made(
    structure: CallStructure,
    windows: HeadWindows,
    groups: int,
    kv_len: int,
    plain: bool,
    device: torch.device,
) -> _Made:
    """Of a structure and its heads' windows; made once per forward pass and shared by layers of equal windows."""

    def make() -> _Made:
        table = torch.tensor(windows, dtype=torch.int32).to(device, non_blocking=True)
        width, sinks = table.unbind(1)
        if plain:
            place = torch.arange(structure.q_len, dtype=torch.int32, device=device)[None]
            place = place + (kv_len - structure.q_len if structure.causal else 0)
            runs = Runs(torch.zeros_like(place), torch.full_like(place, kv_len), place)
        else:
            segments = structure.segments()
            if segments is None:
                raise ValueError(
                    "structure: a dense mask or padding with holes, expected runs; use the sdpa backend"
                )
            runs = runs_of(structure, segments, device)
        tables = [width.repeat_interleave(groups), sinks.repeat_interleave(groups), *(() if plain else runs)]
        return _Made(blocks_of(runs, kv_len, structure.causal, width, sinks), tables, groups)

    return structure.cached(("fa4", windows, groups, device), make)


def _arguments(request: AttentionRequest, windows: HeadWindows | None) -> dict[str, Any]:
    """Keywords that the dense and the packed kernel share; `windows` are alike and without sinks."""
    causal = request.structure.causal
    left = right = None
    if windows is not None and windows[0][0] < ALL:
        left, right = windows[0][0] - 1, 0 if causal else windows[0][0] - 1
    return {
        "softmax_scale": request.scaling,
        "causal": causal,
        "window_size": (left, right),
        "softcap": request.softcap or 0.0,
        "learnable_sink": request.sink_logits,
        "return_lse": request.need_lse,
    }
