"""The flash-attn 4 backend; its kernels are compiled at the first call, for Hopper and later devices."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

from ...attention.call import AttentionCall, AttentionResult
from ...attention.kind import (
    COMPILING,
    GRAD,
    HEAD_BF16,
    HEAD_WINDOWS,
    LSE,
    ONE_QUERY,
    OPAQUE,
    SINKS,
    SOFTCAP,
    WINDOW,
    WINDOW_SINKS,
    CallKind,
)
from ..base import Backend, Kernel, Supports, derived_on, installed, run_refusals
from .variants import attend_runs

if TYPE_CHECKING:
    from ...attention.heads import HeadRules, HeadWindows

_MODULES = ("flash_attn", "flash_attn.cute", "cutlass", "quack")
"""Modules to look for: its own, parents first, and its compiler's, which an interrupted installation may lack."""
_COMPILER = "cutlass"
"""Of several wheels: the directory alone may be there of one that holds libraries."""


class Flash4Backend(Backend):
    """Dense and packed calls by its own kernels; windows per head, and sinks beside a window, by lists of blocks."""

    name, package = "fa4", "flash_attn"
    supports = Supports(
        "flash-attn 4's kernels",
        SOFTCAP | SINKS | LSE | GRAD | COMPILING | OPAQUE | HEAD_WINDOWS,
        "cuda",
        (torch.float16, torch.bfloat16),
        dense=False,
        unless=(
            (SOFTCAP | GRAD, "flash-attn 4 has no gradient through a softcap"),
            (COMPILING, "flash-attn 4 is compiled as it is called, which a traced graph cannot hold"),
            (HEAD_WINDOWS | ONE_QUERY, "flash-attn 4 does not share out the keys of one query"),
            (WINDOW | WINDOW_SINKS | ONE_QUERY, "flash-attn 4 does not share out the keys of one query"),
            (LSE | GRAD, "flash-attn 4's log-sum-exp is not differentiated"),
        ),
    )

    def missing(self) -> tuple[str, ...]:
        """Looks for the package and its imports without importing them; flash-attn 2 has the same package name."""
        for module in _MODULES:
            if not installed(module, whole=module == _COMPILER):
                what = "is not installed" if module.startswith("flash_attn") else "is not installed whole"
                return (f"flash-attn-4 {what} (no module {module}); pip install 'flash-attn-4>=4.0.0b1'",)
        return ()

    def refusals(self, kind: CallKind) -> tuple[str, ...]:
        """What flash-attn 4's kernels cannot compute."""
        from ..capability import capability  # of CUDA alone: registering names does not ask for devices

        asked = kind.features
        same = kind._replace(features=asked & ~HEAD_BF16) if kind.dtype == torch.bfloat16 else kind
        reasons = list(super().refusals(same))
        device = capability(kind.device) if kind.device.type == "cuda" else None
        if kind.device.type == "cuda" and (device is None or device.sm < (9, 0) or device.sm >= (12, 0)):
            # what it offers other devices nobody has run here
            reasons.append("flash-attn 4 serves Hopper and datacentre Blackwell devices")
        lists_needed = asked & HEAD_WINDOWS or (asked & WINDOW_SINKS and asked & WINDOW)
        widest = max(kind.head_dim, kind.head_dim_v)
        limit = 128 if lists_needed or kind.needs_grad else 256
        if widest > limit or widest % 8 or kind.head_dim != kind.head_dim_v:
            reasons.append(
                f"flash-attn 4 serves this with equal head sizes of keys and values up to {limit} that are multiples "
                f"of 8, got {kind.head_dim} and {kind.head_dim_v}"
            )
        if lists_needed and not installed("triton"):
            reasons.append("lists of blocks are made by Triton kernels, and triton is not installed")
        if asked & LSE and kind.shape == "ragged":
            reasons.append("flash-attn 4's log-sum-exp is not put back in place")
        reasons += run_refusals(kind, "flash-attn 4's packed kernels")
        return tuple(reasons)

    def kernel(self, kind: CallKind, rules: HeadRules | None) -> Kernel:
        """One launch: dense, over packed segments, or over lists of blocks."""
        return attend


def attend(call: AttentionCall) -> AttentionResult:
    """By packed or dense kernels where one window serves all heads, else by lists of blocks."""
    # its kernels and those that make lists are launched on the current device; see `triton.launch.Launcher`
    device = call.query.get_device()
    if device >= 0 and device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            return attend(call)
    from ...attention.heads import head_windows

    windows = head_windows(call.structure, call.per_head, call.key.shape[1])
    if windows is not None and (len(set(windows)) > 1 or windows[0][1]):
        return _attend_by_lists(call, windows)
    return attend_runs(call, importlib.import_module("flash_attn.cute"), _arguments(call, windows))


def _attend_by_lists(call: AttentionCall, windows: HeadWindows) -> AttentionResult:
    """Heads of different windows, or sinks beside a window: blocks by lists, their borders by a mask."""
    fa4_lists = importlib.import_module(f"{__package__}.fa4_lists")
    structure, groups = call.structure, call.query.shape[1] // call.key.shape[1]
    # where every query sees one run the mask needs no table, and the kernels align causality to the last key
    plain, kv_len = structure.plain and (structure.causal or structure.offset() == 0), structure.kv_len
    if plain and structure.causal:
        kv_len = min(kv_len, structure.offset() + structure.q_len)
    made = derived_on(structure, call.query.device, fa4_lists.make_lists, windows, groups, kv_len, plain)
    grad = call.query.requires_grad or call.key.requires_grad or call.value.requires_grad
    mask = f"{'causal' if structure.causal else 'both_ways'}{'' if plain else '_runs'}"
    blocks = importlib.import_module("flash_attn.cute.block_sparsity").BlockSparseTensorsTorch
    size = fa4_lists.BLOCK, fa4_lists.BLOCK
    more = {}
    if grad:
        by_keys = derived_on(structure, call.query.device, fa4_lists.turned_lists, windows, groups, kv_len, plain)
        more["block_sparse_tensors_bwd"] = blocks(*by_keys, block_size=size)
    out, lse = importlib.import_module("flash_attn.cute").flash_attn_func(
        call.query.transpose(1, 2),
        call.key[:, :, :kv_len].transpose(1, 2),
        call.value[:, :, :kv_len].transpose(1, 2),
        mask_mod=getattr(importlib.import_module(f"{__package__}.fa4_mask"), mask),
        aux_tensors=made.tables,
        block_sparse_tensors=blocks(*made.lists, block_size=size),
        **_arguments(call, None) | {"causal": False, "pack_gqa": False} | more,
    )
    return AttentionResult(out, lse if call.need_lse else None)


def _arguments(call: AttentionCall, windows: HeadWindows | None) -> dict[str, Any]:
    """Keywords that the dense and the packed kernel share; `windows` are alike and without sinks."""
    from ...attention.heads import ALL

    causal = call.structure.causal
    left = right = None
    if windows is not None and windows[0][0] < ALL:
        left, right = windows[0][0] - 1, 0 if causal else windows[0][0] - 1
    return {
        "softmax_scale": call.scaling,
        "causal": causal,
        "window_size": (left, right),
        "softcap": call.softcap or 0.0,
        "learnable_sink": call.sink_logits,
        "return_lse": call.need_lse,
    }
