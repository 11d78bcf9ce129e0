"""The native kernels as a backend: what they serve, and which of their entrances a call takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...attention.request import AttentionRequest, AttentionResult, CallSpec
from ..base import Backend, Launch, by_requests, nothing_seen, unnamed
from .ops import traced

if TYPE_CHECKING:
    from ...attention.heads import HeadRules

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SERVES = (
    "softcap", "sink_logits", "bias", "need_lse", "needs_grad", "compiling", "opaque", "stored", "head_windows",
    "head_precision", "head_until",
)  # fmt: skip


class NativeBackend(Backend):
    """Serves every structure on CPUs where the library has been built, forward and backward."""

    name, device = "native", "cpu"

    def missing(self) -> tuple[str, ...]:
        """The library, where it was not built or cannot be loaded."""
        from .library import missing

        return missing()

    def refusals(self, spec: CallSpec) -> tuple[str, ...]:
        """Other devices and dtypes, dropout, and rules per head where gradients or a graph are wanted of them."""
        reasons = list(unnamed(spec, "the native kernels", _SERVES))
        if spec.device != "cpu":
            reasons.append(f"the native kernels run on CPUs, the tensors are on {spec.device}")
        if spec.dtype not in _DTYPES:
            reasons.append(f"the native kernels have no {spec.dtype}; they have float32, bfloat16 and float16")
        if spec.opaque:
            reasons.append("the native kernels read memory, which tensors that trace, wrap or shard do not have")
        if spec.compiling and torch.onnx.is_in_onnx_export():
            reasons.append("ONNX has no operator for the native kernels")
        if spec.stored is not None and (spec.needs_grad or spec.compiling):
            reasons.append(
                f"the native kernels read keys stored as {spec.stored} without a gradient and outside of graphs"
            )
        if spec.per_head:
            reasons += _refused_rules(spec)
        return tuple(reasons)

    def attend(self, request: AttentionRequest) -> AttentionResult:
        """Attention in one call of the library, whatever the structure; with rules per head one for each precision.

        Without a gradient the library is called directly: the dispatcher of an operator would cost more than a small
        call.
        """
        if request.per_head is None and torch.compiler.is_compiling():
            return AttentionResult(*traced(request))
        if request.asks_nothing:
            return nothing_seen(request)
        from . import launch

        if request.per_head is not None:
            return launch.by_groups(request, launch.groups_of(request.per_head, request.query.dtype))
        tensors = (request.query, request.key, request.value, request.bias, request.sink_logits)
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
            return launch.differentiated(request)
        return launch.computed(request)

    def launches(self, rules: HeadRules) -> tuple[str, ...]:
        """One call of the library for each precision."""
        return tuple(f"{precision} products" for precision in rules.precisions)

    def prepare(self, spec: CallSpec, rules: HeadRules | None = None) -> Launch:
        """One call of the library, with rules per head one for each precision; `attend` where a gradient is wanted."""
        from . import launch
        from .library import library

        native = library()
        if native is None or spec.needs_grad or spec.compiling:
            return super().prepare(spec, rules)
        if rules is None:
            return launch.one_call(native)
        groups = launch.groups_of(rules, spec.dtype)
        if len(groups) > 1 or groups[0].key_mean is not None:
            return by_requests(lambda request: launch.by_groups(request, groups), rules)
        return launch.one_call(native, groups[0], rules)


def _refused_rules(spec: CallSpec) -> list[str]:
    from ..capability import of_level
    from .library import level_here

    reasons = []
    if spec.needs_grad:
        reasons.append("the native kernels have no gradient of rules per head")
    if spec.compiling:
        reasons.append("rules per head need data that cannot be read while a graph is traced")
    if spec.head_until:
        reasons.append("the native kernels have no rules per head up to a position")
    if spec.stored is not None and spec.head_precision in ("int8", "mixed"):
        reasons.append(f"the native kernels read keys stored as {spec.stored} without int8 products")
    if spec.head_precision in ("int8", "mixed"):
        level = level_here()
        if not of_level(level).int8:
            reasons.append(f"the native kernels multiply int8 at level avx512_bf16 or amx, this processor runs {level}")
    return reasons
