"""Plain attention: scores, softmax and product as three operations, in at least fp32 for the softmax."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention.request import AttentionRequest, AttentionResult, CallSpec
from ..attention.tap import autocast_device
from .base import Backend, nothing_seen, unnamed

_SERVES = (
    "dropout", "softcap", "sink_logits", "bias", "need_lse", "needs_grad", "compiling", "opaque", "stored",
)  # fmt: skip


def _weights_and_lse(request: AttentionRequest) -> tuple[Tensor, Tensor]:
    """Weights `[batch, heads, q_len, kv_len]` in the softmax's dtype, without dropout, and the row's log-sum-exp."""
    query, key = request.query, request.key
    batch, heads, q_len, head_dim = query.shape
    kv_heads, kv_len = key.shape[1], key.shape[2]
    # Autocast would demote these products, and a finite mask value of fp32 overflows in bf16.
    with torch.autocast(autocast_device(query), enabled=False):
        # half precision would overflow in products of logits beyond 6.5e4, and round those of a few hundred
        wide = torch.promote_types(query.dtype, torch.float32)
        grouped = query.to(wide).reshape(batch, kv_heads, heads // kv_heads * q_len, head_dim)
        scores = torch.matmul(grouped, key.to(wide).transpose(2, 3)).view(batch, heads, q_len, kv_len)
        scores = scores * request.scaling
        if request.softcap is not None:
            scores = request.softcap * torch.tanh(scores / request.softcap)
        if request.bias is not None:
            scores = scores + request.bias.to(scores.dtype)
        scores = scores.masked_fill(~request.structure.visible(device=query.device), float("-inf"))
        top = scores.amax(dim=3, keepdim=True)
        if request.sink_logits is not None:
            sink = request.sink_logits.to(scores.dtype).reshape(1, -1, 1, 1)
            top = torch.maximum(top, sink)
        top = top.masked_fill(torch.isinf(top), 0.0).detach()
        weights = torch.exp(scores - top)
        total = weights.sum(dim=3, keepdim=True)
        if request.sink_logits is not None:
            total = total + torch.exp(sink - top)
        lse = (top + torch.log(total)).squeeze(3)
        return weights / total.masked_fill(total == 0, 1.0), lse


def attention_weights(request: AttentionRequest) -> Tensor:
    """The softmax weights `[batch, heads, q_len, kv_len]` in the query's dtype, before dropout."""
    if not request.key.shape[2]:
        return request.query.new_zeros((*request.query.shape[:3], 0))
    return _weights_and_lse(request.widened())[0].to(request.query.dtype)


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
        weights, lse = _weights_and_lse(request)
        value = request.value
        weights = weights.to(value.dtype)
        if request.dropout:
            weights = F.dropout(weights, request.dropout)
        batch, heads, q_len, kv_len = weights.shape
        kv_heads = value.shape[1]
        with torch.autocast(autocast_device(value), enabled=False):
            grouped = weights.reshape(batch, kv_heads, heads // kv_heads * q_len, kv_len)
            out = torch.matmul(grouped, value).view(batch, heads, q_len, value.shape[3])
        out = out.to(request.query.dtype)
        return AttentionResult(out.transpose(1, 2), lse.float() if request.need_lse else None)
