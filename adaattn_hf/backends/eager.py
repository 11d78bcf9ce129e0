"""Plain attention: scores, softmax and product as three operations, in at least fp32 for the softmax."""

import torch
from torch import Tensor

from ..attention.call import AttentionCall, AttentionResult
from ..attention.kind import BIAS, COMPILING, DROPOUT, GRAD, LSE, OPAQUE, SINKS, SOFTCAP, STORED, CallKind
from ..attention.softmax import softmax_parts, weighted
from .base import Backend, Kernel, PerHead, Supports


def _parts(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    visible = call.structure.visible(device=call.query.device)
    return softmax_parts(
        call.query, call.key, call.scaling,
        softcap=call.softcap, sinks=call.sink_logits, bias=call.bias, mask=visible,
    )  # fmt: skip


def attention_weights(call: AttentionCall) -> Tensor:
    """The softmax weights `[batch, heads, q_len, kv_len]` in the query's dtype, before dropout."""
    if not call.key.shape[2]:
        return call.query.new_zeros((*call.query.shape[:3], 0))
    return _parts(call.dequantised())[0].to(call.query.dtype)


class EagerBackend(Backend):
    """Serves everything but rules per head, at the price of the full score matrix."""

    name = "eager"
    supports = Supports(
        "three plain operations", DROPOUT | SOFTCAP | SINKS | BIAS | LSE | GRAD | COMPILING | OPAQUE | STORED
    )

    def kernel(self, kind: CallKind, rules: PerHead) -> Kernel:
        """The same for every kind."""
        return _attend


def _attend(call: AttentionCall) -> AttentionResult:
    """Attention with the score matrix in memory; dropout falls on the normalised weights."""
    call = call.dequantised()
    weights, top, total = _parts(call)
    out = weighted(weights, call.value, call.dropout).to(call.query.dtype)
    lse = (top + torch.log(total)).squeeze(3).float() if call.need_lse else None
    return AttentionResult(out.transpose(1, 2), lse)
