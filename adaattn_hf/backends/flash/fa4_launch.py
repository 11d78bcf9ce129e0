"""Launches flash-attn 4: dense, over packed segments, or over lists of blocks with a window per head."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch

from ...attention.heads import ALL, HeadWindows, head_windows
from ...attention.request import AttentionRequest, AttentionResult
from ...attention.structure import CallStructure
from ..base import derived_on
from .fa4_lists import BLOCK, BlockLists, runs_of
from .variants import attend_runs

# its compiler says so of every mask that it cannot take as a launch's argument, and compiles it in
warnings.filterwarnings("ignore", "Argument aux_data", UserWarning)


def _kernels() -> Any:
    return importlib.import_module("flash_attn.cute")


def attend(request: AttentionRequest) -> AttentionResult:
    """One launch: dense, over packed segments, or over lists of blocks."""
    windows = head_windows(request.structure, request.per_head, request.key.shape[1])
    if windows is not None and (len(set(windows)) > 1 or windows[0][1]):
        return _listed(request, windows)
    return attend_runs(request, _kernels(), _arguments(request, windows))


def _listed(request: AttentionRequest, windows: HeadWindows) -> AttentionResult:
    """Heads of different windows, or sinks beside a window: blocks by lists, their borders by a mask."""
    structure, groups = request.structure, request.query.shape[1] // request.key.shape[1]
    plain, kv_len = _plain(structure), _keys(structure)
    made = derived_on(structure, request.query.device, _make_lists, windows, groups)
    mask = f"{'causal' if structure.causal else 'both_ways'}{'' if plain else '_runs'}"
    listing = importlib.import_module("flash_attn.cute.block_sparsity").BlockSparseTensorsTorch
    more = {}
    if request.query.requires_grad or request.key.requires_grad or request.value.requires_grad:
        more["block_sparse_tensors_bwd"] = listing(*made.by_keys, block_size=(BLOCK, BLOCK))
    out, lse = _kernels().flash_attn_func(
        request.query.transpose(1, 2),
        request.key[:, :, :kv_len].transpose(1, 2),
        request.value[:, :, :kv_len].transpose(1, 2),
        mask_mod=getattr(importlib.import_module(f"{__package__}.fa4_mask"), mask),
        aux_tensors=made.tables,
        block_sparse_tensors=listing(*made.by_queries, block_size=(BLOCK, BLOCK)),
        **_arguments(request, None) | {"causal": False, "pack_gqa": False} | more,
    )
    return AttentionResult(out, lse if request.need_lse else None)


def _plain(structure: CallStructure) -> bool:
    """Whether every query sees one run, of which the mask needs no table."""
    return structure.plain and (structure.causal or structure.offset() == 0)


def _keys(structure: CallStructure) -> int:
    """Keys that the kernels are given: where runs need no table, they align causality to the last one."""
    if _plain(structure) and structure.causal:
        return min(structure.kv_len, structure.offset() + structure.q_len)
    return structure.kv_len


def _make_lists(structure: CallStructure, device: torch.device, windows: HeadWindows, groups: int) -> BlockLists:
    by_head = [[rule[i] for rule in windows for _ in range(groups)] for i in range(2)]
    kv_len, runs = _keys(structure), None
    with torch.inference_mode(False):  # a later pass may want gradients
        table = torch.tensor(by_head, dtype=torch.int32, device="cpu").to(device, non_blocking=True)
        if not _plain(structure):
            segments = structure.segments()
            if segments is None:
                raise ValueError("structure: a dense mask or padding with holes, expected runs; use the sdpa backend")
            runs = runs_of(structure, segments, device)
        return BlockLists(table, groups, structure.q_len, kv_len, structure.causal, runs)


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
