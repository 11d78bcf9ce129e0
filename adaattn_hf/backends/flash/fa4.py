"""The flash-attn 4 backend; its kernels are compiled at the first call, for Hopper and later devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...attention.kind import (
    COMPILING,
    GRAD,
    HEAD_BF16,
    HEAD_WINDOWS,
    LSE,
    OPAQUE,
    SINKS,
    SOFTCAP,
    WINDOW,
    WINDOW_SINKS,
    CallSpec,
)
from ...attention.request import AttentionRequest, AttentionResult
from ..base import Backend, Kernel, Supports, installed, run_refusals

if TYPE_CHECKING:
    from ...attention.heads import HeadRules

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
        ),
    )

    def missing(self) -> tuple[str, ...]:
        """Looks for the package and its imports without importing them; flash-attn 2 has the same package name."""
        for module in _MODULES:
            if not installed(module, whole=module == _COMPILER):
                what = "is not installed" if module.startswith("flash_attn") else "is not installed whole"
                return (f"flash-attn-4 {what} (no module {module}); pip install 'flash-attn-4>=4.0.0b1'",)
        return ()

    def refusals(self, kind: CallSpec) -> tuple[str, ...]:
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
        if lists_needed and kind.decode:
            reasons.append("flash-attn 4 does not share out the keys of one query")
        if asked & LSE and (kind.shape == "ragged" or kind.needs_grad):
            reasons.append("flash-attn 4's log-sum-exp is not put back in place, and not differentiated")
        reasons += run_refusals(kind, "flash-attn 4's packed kernels")
        return tuple(reasons)

    def kernel(self, kind: CallSpec, rules: HeadRules | None) -> Kernel:
        """One launch: dense, over packed segments, or over lists of blocks."""
        from .fa4_launch import attend  # which filters a warning, as importing the package must not

        def launch(request: AttentionRequest) -> AttentionResult:
            # its kernels and those that make lists are launched on the current device; see `Launcher`
            device = request.query.get_device()
            if device >= 0 and device != torch._C._cuda_getDevice():
                with torch.cuda.device(device):
                    return attend(request)
            return attend(request)

        return launch
