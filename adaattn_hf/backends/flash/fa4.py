"""The flash-attn 4 backend; its kernels are compiled at the first call, for Hopper and later devices."""

from __future__ import annotations

import torch

from ...attention.request import AttentionRequest, AttentionResult, CallSpec
from ..base import Backend, installed, nothing_seen, run_refusals, unnamed

_MODULES = ("flash_attn", "flash_attn.cute", "cutlass", "quack")
"""Modules to look for: its own, parents first, and its compiler's, which an interrupted installation may lack."""
_COMPILER = "cutlass"
"""Of several wheels: the directory alone may be there of one that holds libraries."""

_SERVES = ("softcap", "sink_logits", "need_lse", "needs_grad", "compiling", "opaque", "head_windows")


class Flash4Backend(Backend):
    """Dense and packed calls by its own kernels; windows per head, and sinks beside a window, by lists of blocks."""

    name, device, package = "fa4", "cuda", "flash_attn"

    def missing(self) -> tuple[str, ...]:
        """Looks for the package and its imports without importing them; flash-attn 2 has the same package name."""
        for module in _MODULES:
            if not installed(module, whole=module == _COMPILER):
                what = "is not installed" if module.startswith("flash_attn") else "is not installed whole"
                return (f"flash-attn-4 {what} (no module {module}); pip install 'flash-attn-4>=4.0.0b1'",)
        return ()

    def refusals(self, spec: CallSpec) -> tuple[str, ...]:
        """What flash-attn 4's kernels cannot compute."""
        from ..capability import capability  # of CUDA alone: registering names does not ask for devices

        same = spec.head_precision == "bf16" and spec.dtype == torch.bfloat16
        served = spec._replace(head_precision="model" if same else spec.head_precision)
        reasons = list(unnamed(served, "flash-attn 4's kernels", _SERVES))
        device = capability(spec.device_index) if spec.device == "cuda" else None
        if spec.device != "cuda":
            reasons.append(f"flash-attn 4 runs on CUDA, got {spec.device} tensors")
        elif device is None or device.sm < (9, 0) or device.sm >= (12, 0):
            # what it offers other devices nobody has run here
            reasons.append("flash-attn 4 serves Hopper and datacentre Blackwell devices")
        if spec.dtype not in (torch.float16, torch.bfloat16):
            reasons.append(f"flash-attn 4 computes in float16 or bfloat16, got {spec.dtype}")
        lists_needed = spec.head_windows or (spec.window_sinks and spec.windowed)
        widest = max(spec.head_dim, spec.head_dim_v)
        limit = 128 if lists_needed or spec.needs_grad else 256
        if widest > limit or widest % 8 or spec.head_dim != spec.head_dim_v:
            reasons.append(
                f"flash-attn 4 serves this with equal head sizes of keys and values up to {limit} that are multiples "
                f"of 8, got {spec.head_dim} and {spec.head_dim_v}"
            )
        if lists_needed and not installed("triton"):
            reasons.append("lists of blocks are made by Triton kernels, and triton is not installed")
        if lists_needed and spec.decode:
            reasons.append("flash-attn 4 does not share out the keys of one query")
        if spec.kind == "irregular":
            reasons.append("flash-attn 4 takes no dense mask")
        if spec.softcap and spec.needs_grad:
            reasons.append("flash-attn 4 has no gradient through a softcap")
        if spec.need_lse and (spec.kind == "ragged" or spec.needs_grad):
            reasons.append("flash-attn 4's log-sum-exp is not put back in place, and not differentiated")
        reasons += run_refusals(spec, "flash-attn 4's packed kernels")
        if spec.compiling:
            reasons.append("flash-attn 4 is compiled as it is called, which a traced graph cannot hold")
        return tuple(reasons)

    def attend(self, request: AttentionRequest) -> AttentionResult:
        """One launch: dense, over packed segments, or over lists of blocks."""
        if request.asks_nothing:
            return nothing_seen(request)
        from .fa4_launch import attend  # which filters a warning, as importing the package must not

        # its kernels and those that make lists are launched on the current device; see `Launcher`
        device = request.query.get_device()
        if device >= 0 and device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return self.attend(request)
        return attend(request)
