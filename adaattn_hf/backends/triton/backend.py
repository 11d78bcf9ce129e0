"""The Triton kernels as a backend: what they serve, and which of the two runs."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

import torch

from ...attention.heads import head_windows
from ...attention.request import AttentionRequest, AttentionResult, CallSpec
from ..base import Backend, installed, nothing_seen, unnamed
from .ops import traced_step

_DTYPES = (torch.float16, torch.bfloat16)
_SERVES = (
    "softcap", "sink_logits", "need_lse", "needs_grad", "compiling", "opaque", "stored", "head_windows",
)  # fmt: skip


class TritonBackend(Backend):
    """Segments, windows, sinks and grouped heads, per head and with gradients, without a mask in memory.

    Decode steps run in fp32, too, and read lengths and padding where they are: a CUDA graph can capture them.
    """

    name, device, package = "triton", "cuda", "triton"

    def missing(self) -> tuple[str, ...]:
        """The package is looked for without being imported, and what it builds its launchers with."""
        return cannot_build() if installed("triton") else ("triton is not installed",)

    def refusals(self, spec: CallSpec) -> tuple[str, ...]:
        """What the kernels cannot compute."""
        from ..capability import capability  # only of CUDA: registering names does not ask for devices
        from .tiling import LEAST_SM, refusals

        same = spec.head_precision == "bf16" and spec.dtype == torch.bfloat16
        served = spec._replace(
            head_precision="model" if same else spec.head_precision, head_until=spec.head_until and not spec.compiling
        )
        reasons = list(unnamed(served, "the Triton kernels", _SERVES))
        facts = capability(spec.device_index) if spec.device == "cuda" else None
        if spec.device != "cuda":
            reasons.append(f"the Triton kernels run on CUDA devices, got {spec.device} tensors")
        elif facts and facts.sm < LEAST_SM:
            reasons.append(
                f"Triton multiplies on matrix units from compute capability 8.0 on, got {facts.sm[0]}.{facts.sm[1]}"
            )
        if spec.dtype not in _DTYPES and not (spec.decode and not spec.needs_grad and spec.dtype == torch.float32):
            reasons.append(
                f"the Triton kernels compute in float16 or bfloat16, and one query in float32, got {spec.dtype}"
            )
        if (widest := max(spec.head_dim, spec.head_dim_v)) > 256:
            reasons.append(f"the Triton kernels serve head sizes up to 256, got {widest}")
        if spec.stored is not None and (not spec.decode or spec.needs_grad):
            reasons.append(
                f"the Triton kernels read keys and values stored as {spec.stored} for one query and without a gradient"
            )
        if spec.stored is not None and spec.head_dim_v % 2:
            reasons.append(
                "the Triton kernels read stored values two channels at a time, got a value head size of "
                f"{spec.head_dim_v}"
            )
        if spec.kind == "irregular":
            reasons.append("the Triton kernels take no dense mask")
        if spec.kind == "ragged" and spec.needs_grad and spec.decode and spec.holes is None:
            reasons.append(
                "the Triton kernels have no gradient over padding with holes, and nobody has looked whether it has any"
            )
        if spec.compiling and (not spec.decode or spec.needs_grad or spec.need_lse):
            reasons.append(
                "the segments of a call cannot be read while a graph is traced, but for one query "
                "without a gradient and without the log-sum-exp"
            )
        if facts and not reasons:
            reasons += refusals(spec, facts.shared_memory)
        return tuple(reasons)

    def specialised(self, spec: CallSpec) -> bool:
        """Whether heavy calls of this kind run on the kernels for Hopper, if their tensors lie as models make them."""
        from ..capability import capability
        from .tiling import warps_of

        facts = capability(spec.device_index)
        if spec.compiling or facts is None or not facts.tiles or self.missing():
            return False
        from .launch import device_facts

        plain = spec.head_dim == spec.head_dim_v and spec.dtype in _DTYPES and not spec.softcap
        windows = spec.head_windows or spec.windowed
        index = torch.cuda.current_device() if spec.device_index is None else spec.device_index
        served = plain and warps_of(spec.head_dim, spec.groups, windows) is not None
        return served and device_facts(torch.device("cuda", index)).specialised

    def attend(self, request: AttentionRequest) -> AttentionResult:
        """One launch over all segments; few queries share the keys among many programs."""
        if torch.compiler.is_compiling():
            return AttentionResult(traced_step(request))
        if request.asks_nothing:
            return nothing_seen(request)
        tensors = (request.query, request.key, request.value, request.sink_logits)
        grad = torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors)
        windows = head_windows(request.structure, request.per_head, request.key.shape[1])
        if grad:
            from .backward import attend_with_gradients

            return attend_with_gradients(request, windows)
        if request.query.shape[2] > 1:
            from .forward import attend_forward

            return attend_forward(request, windows)
        from .step import attend_step, constants_for

        return attend_step(constants_for(request), request, windows)


def cannot_build() -> tuple[str, ...]:
    """What Triton lacks for the C that it compiles before its first launch on this machine; empty if nothing.

    Found out without importing it, as it looks itself (`triton/runtime/build.py`); on Windows it brings a compiler.
    """
    if os.name == "nt":
        return ()
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    header = Path(sysconfig.get_paths(scheme)["include"]) / "Python.h"
    reasons = []
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        reasons.append("triton finds no C compiler, which it needs to launch kernels: install gcc, or set CC")
    if not header.is_file():
        reasons.append(f"triton needs Python's headers to launch kernels: no {header} (package python3-dev)")
    return tuple(reasons)
