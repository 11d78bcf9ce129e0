"""Plain attention: scores, softmax and product as three operations, in at least fp32 for the softmax."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..attention.kind import (
    BIAS,
    COMPILING,
    DROPOUT,
    GRAD,
    LSE,
    OPAQUE,
    SINKS,
    SOFTCAP,
    STORED,
    CallSpec,
)
from ..attention.request import AttentionRequest, AttentionResult
from .base import Backend, Kernel, Supports

if TYPE_CHECKING:
    from ..attention.heads import HeadRules


def _parts(request: AttentionRequest) -> tuple[Tensor, Tensor, Tensor]:
    from ..attention.softmax import softmax_parts

    visible = request.structure.visible(device=request.query.device)
    return softmax_parts(
        request.query, request.key, request.scaling,
        softcap=request.softcap, sinks=request.sink_logits, bias=request.bias, mask=visible,
    )  # fmt: skip


def attention_weights(request: AttentionRequest) -> Tensor:
    """The softmax weights `[batch, heads, q_len, kv_len]` in the query's dtype, before dropout."""
    if not request.key.shape[2]:
        return request.query.new_zeros((*request.query.shape[:3], 0))
    return _parts(request.widened())[0].to(request.query.dtype)


class EagerBackend(Backend):
    """Serves everything but rules per head, at the price of the full score matrix."""

    name = "eager"
    supports = Supports(
        "three plain operations", DROPOUT | SOFTCAP | SINKS | BIAS | LSE | GRAD | COMPILING | OPAQUE | STORED
    )

    def kernel(self, kind: CallSpec, rules: HeadRules | None) -> Kernel:
        """The same for every kind."""
        return _attend


def _attend(request: AttentionRequest) -> AttentionResult:
    """Attention with the score matrix in memory; dropout falls on the normalised weights."""
    from ..attention.softmax import weighted

    request = request.widened()
    weights, top, total = _parts(request)
    out = weighted(weights, request.value, request.dropout).to(request.query.dtype)
    lse = (top + torch.log(total)).squeeze(3).float() if request.need_lse else None
    return AttentionResult(out.transpose(1, 2), lse)
