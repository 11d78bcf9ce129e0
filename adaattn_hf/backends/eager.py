"""Plain attention: scores, softmax and product as three operations, in at least fp32 for the softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention.request import AttentionRequest, AttentionResult, CallSpec
from .base import Backend, nothing_seen, softmax_parts, unnamed, weighted

_SERVES = (
    "dropout", "softcap", "sink_logits", "bias", "need_lse", "needs_grad", "compiling", "opaque", "stored",
)  # fmt: skip


def _parts(request: AttentionRequest) -> tuple[Tensor, Tensor, Tensor]:
    visible = request.structure.visible(device=request.query.device)
    return softmax_parts(request, request.query, request.key, visible, request.bias)


def attention_weights(request: AttentionRequest) -> Tensor:
    """The softmax weights `[batch, heads, q_len, kv_len]` in the query's dtype, before dropout."""
    if not request.key.shape[2]:
        return request.query.new_zeros((*request.query.shape[:3], 0))
    return _parts(request.widened())[0].to(request.query.dtype)


class EagerBackend(Backend):
    """Serves everything, at the price of the full score matrix."""

    name = "eager"

    def refusals(self, spec: CallSpec) -> tuple[str, ...]:
        """Refuses what heads are asked apart alone."""
        return unnamed(spec, "three plain operations", _SERVES)

    def attend(self, request: AttentionRequest) -> AttentionResult:
        """Attention with the score matrix in memory; dropout falls on the normalised weights."""
        request = request.widened()
        if request.asks_nothing:
            return nothing_seen(request)
        weights, top, total = _parts(request)
        out = weighted(weights, request.value, request.dropout).to(request.query.dtype)
        lse = (top + torch.log(total)).squeeze(3).float() if request.need_lse else None
        return AttentionResult(out.transpose(1, 2), lse)
