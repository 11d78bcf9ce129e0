"""The Triton kernels as a backend: what they serve, and which of the two runs."""

import os
import shutil
import sysconfig
from functools import partial
from pathlib import Path

import torch

from ...attention.call import AttentionResult
from ...attention.kind import (
    BITS,
    COMPILING,
    GRAD,
    HEAD_BF16,
    HEAD_UNTIL,
    HEAD_WINDOWS,
    LSE,
    OPAQUE,
    PAGES,
    SINKS,
    SOFTCAP,
    STORED,
    WINDOW,
    CallKind,
)
from .. import capability
from ..base import Backend, Kernel, PerHead, Supports, installed
from .ops import traced_step

_DTYPES = (torch.float16, torch.bfloat16)


class TritonBackend(Backend):
    """Segments, windows, sinks and grouped heads, per head and with gradients, without a mask in memory.

    Decode steps run in fp32, too, and read lengths and padding where they are: a CUDA graph can capture them.
    """

    name, package = "triton", "triton"
    supports = Supports(
        "the Triton kernels",
        SOFTCAP | SINKS | LSE | GRAD | COMPILING | OPAQUE | STORED | PAGES | HEAD_WINDOWS,
        "cuda",
        widest=256,
        dense=False,
    )

    def missing(self) -> tuple[str, ...]:
        """The package is looked for without being imported, and what it builds its launchers with."""
        return cannot_build() if installed("triton") else ("triton is not installed",)

    def refusals(self, kind: CallKind) -> tuple[str, ...]:
        """What the kernels cannot compute."""
        from .tiling import LEAST_SM, refusals

        # in bfloat16 nothing has to be rounded for heads that compute in it
        served = HEAD_BF16 if kind.dtype == torch.bfloat16 else 0
        # where the rules end, the kernel ends a window of the structure, too
        served |= HEAD_UNTIL if (kind.compiling or kind.features & PAGES) and not kind.features & WINDOW else 0
        reasons = list(super().refusals(kind._replace(features=kind.features & ~served)))
        facts = capability.capability(kind.device) if kind.device.type == "cuda" else None
        if facts and facts.sm < LEAST_SM:
            reasons.append(
                f"Triton multiplies on matrix units from compute capability 8.0 on, got {facts.sm[0]}.{facts.sm[1]}"
            )
        if kind.dtype not in _DTYPES and not (kind.decode and not kind.needs_grad and kind.dtype == torch.float32):
            reasons.append(
                f"the Triton kernels compute in float16 or bfloat16, and one query in float32, got {kind.dtype}"
            )
        if kind.stored is not None and (not kind.decode or kind.needs_grad):
            reasons.append(
                f"the Triton kernels read keys and values stored as {kind.stored} for one query and without a gradient"
            )
        if kind.stored is not None and kind.head_dim_v % 2:
            reasons.append(
                "the Triton kernels read stored values two channels at a time, got a value head size of "
                f"{kind.head_dim_v}"
            )
        if kind.shape == "ragged" and kind.needs_grad and kind.decode and kind.holes is None:
            reasons.append(
                "the Triton kernels have no gradient over padding with holes, and nobody has looked whether it has any"
            )
        if kind.compiling and (not kind.decode or kind.features & (GRAD | LSE)):
            reasons.append(
                "the segments of a call cannot be read while a graph is traced, but for one query "
                "without a gradient and without the log-sum-exp"
            )
        if facts and not reasons:
            reasons += refusals(kind, facts.shared_memory)
        return tuple(reasons)

    def specialised(self, kind: CallKind) -> bool:
        """Whether heavy calls of this kind run on the kernel for Hopper, if their tensors lie as models make them."""
        facts = capability.capability(kind.device)
        if kind.compiling or facts is None or not facts.tiles or self.missing():
            return False
        from .launch import device_facts
        from .tiling import warps_of

        index = torch.cuda.current_device() if kind.device.index is None else kind.device.index
        warps = warps_of(kind, bool(kind.features & (HEAD_WINDOWS | WINDOW)))
        return warps is not None and device_facts(torch.device("cuda", index)).specialised

    def kernel(self, kind: CallKind, rules: PerHead) -> Kernel:
        """One launch over all segments; few queries share the keys among many programs."""
        if kind.compiling:
            return lambda call: AttentionResult(traced_step(call))
        if kind.needs_grad:
            from .backward import attend_with_gradients

            return partial(attend_with_gradients, kind=kind)
        if not kind.decode:
            from .forward import attend_forward

            return partial(attend_forward, kind=kind)
        from .step import attend_step, constants_of

        bits = 0 if kind.stored is None else BITS[kind.stored]
        constants = constants_of(kind.groups, kind.head_dim, kind.head_dim_v, kind.dtype, bits, kind.device)
        return lambda call: attend_step(call, constants)


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
