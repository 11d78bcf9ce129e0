"""Attention through torch's own fused kernels, called as the structure of a call suggests."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from ...attention.request import AttentionRequest, AttentionResult, CallSpec
from ..base import Backend, Launch, unnamed

if TYPE_CHECKING:
    from ...attention.heads import HeadRules
    from ...attention.stored import StoredKV
    from ...attention.structure import CallStructure

_SERVES = ("dropout", "softcap", "sink_logits", "bias", "needs_grad", "compiling", "opaque")


class SdpaBackend(Backend):
    """Serves every structure on every device, forward and backward."""

    name = "sdpa"

    def refusals(self, spec: CallSpec) -> tuple[str, ...]:
        """What it cannot compute."""
        reasons = unnamed(spec, "torch's kernels", _SERVES)
        if spec.device == "meta" and spec.kind == "ragged" and not spec.compiling:
            reasons += ("meta tensors have no padding to read, by which calls of torch's kernels are made",)
        return reasons

    def attend(self, request: AttentionRequest) -> AttentionResult:
        """Attention in as few calls of the operator as the structure allows."""
        from .dispatch import attend

        scaling = request.scaling
        if isinstance(scaling, (int, float)) and scaling <= 0:
            # torch's causal CPU kernel hides keys by an infinity times this factor
            query, scaling = (-request.query, -scaling) if scaling < 0 else (request.query * 0.0, 1.0)
            request = replace(request, query=query, scaling=scaling)
        return attend(request)

    def prepare(self, spec: CallSpec, rules: HeadRules | None = None) -> Launch:
        """One call, masked or not, or calls over packed runs; `attend` where a structure needs more."""
        from .dispatch import way_of

        other = super().prepare(spec, rules)
        if spec.opaque:
            return other
        way = way_of(spec)

        def launch(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            scaling: float,
            structure: CallStructure,
            stored: StoredKV | None = None,
        ) -> Tensor:
            out = way(query, key, value, scaling, structure)
            return other(query, key, value, scaling, structure) if out is None else out

        return launch
