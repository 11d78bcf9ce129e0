"""The native kernels as a backend: what they serve, and which of their entrances a kind of call takes."""

import torch

from ...attention.kind import (
    BIAS,
    COMPILING,
    GRAD,
    HEAD_BF16,
    HEAD_INT8,
    HEAD_WINDOWS,
    LSE,
    OPAQUE,
    PER_HEAD,
    SINKS,
    SOFTCAP,
    STORED,
    CallKind,
)
from ..base import Backend, Kernel, PerHead, Supports
from ..capability import of_level
from .ops import traced

_NO_GRADIENT_OF_CODES = "the native kernels read stored keys and values without a gradient and outside of graphs"


class NativeBackend(Backend):
    """Serves every structure on CPUs where the library has been built, forward and backward."""

    name = "native"
    supports = Supports(
        "the native kernels",
        SOFTCAP | SINKS | BIAS | LSE | GRAD | COMPILING | OPAQUE | STORED | HEAD_WINDOWS | HEAD_BF16 | HEAD_INT8,
        "cpu",
        (torch.float32, torch.bfloat16, torch.float16),
        unless=(
            (OPAQUE, "the native kernels read memory, which tensors that trace, wrap or shard do not have"),
            (STORED | GRAD, _NO_GRADIENT_OF_CODES),
            (STORED | COMPILING, _NO_GRADIENT_OF_CODES),
            (STORED | HEAD_INT8, "the native kernels read stored keys and values without int8 products"),
            (PER_HEAD | GRAD, "the native kernels have no gradient of rules per head"),
            (PER_HEAD | COMPILING, "rules per head need data that cannot be read while a graph is traced"),
        ),
    )

    def missing(self) -> tuple[str, ...]:
        """The library, where it was not built or cannot be loaded."""
        from .library import missing

        lacking: tuple[str, ...] = missing()
        return lacking

    def refusals(self, kind: CallKind) -> tuple[str, ...]:
        """Other devices and dtypes, dropout, and rules per head where gradients or a graph are wanted of them."""
        reasons = super().refusals(kind)
        if kind.compiling and torch.onnx.is_in_onnx_export():
            reasons += ("ONNX has no operator for the native kernels",)
        if kind.features & HEAD_INT8:
            from .library import level_here

            level = level_here()
            if not of_level(level).int8:
                reasons += (
                    f"the native kernels multiply int8 at level avx512_bf16 or amx, this processor runs {level}",
                )
        return reasons

    def launch_name(self, precision: str) -> str:
        """One call of the library for each precision."""
        return f"{precision} products"

    def kernel(self, kind: CallKind, rules: PerHead) -> Kernel:
        """One call of the library, whatever the structure; with rules per head one for each precision.

        Without a gradient the library is called directly: the dispatcher of an operator would cost more than a small
        call.
        """
        if kind.compiling:
            return traced
        from . import launch

        return launch.differentiated if kind.needs_grad else launch.kernel_of(kind, rules)
