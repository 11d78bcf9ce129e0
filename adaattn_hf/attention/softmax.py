"""Attention written out: weights by separate operations, for whoever needs them, or has no kernel for a call."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .call import narrowed
from .tracing import autocast_device


def softmax_parts(
    query: Tensor,
    key: Tensor,
    scaling: float,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    work: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights `[batch, heads, q_len, kv_len]` by separate operations, in at least fp32 and without dropout.

    With them come each row's largest score, 0 where that is infinite, and its sum of exponentials, as columns. A row
    that sees no key has weights of zero.

    Args:
        query, key: `[batch, heads, q_len, head_dim]`, `[batch, num_kv_heads, kv_len, head_dim]`.
        scaling, softcap, sinks, bias: As in `AttentionCall`; the bias is added before the mask.
        mask: Boolean, or numbers to add, broadcastable to the weights.
        work: Dtype of the products; that of the softmax when None.
    """
    batch, heads, q_len, dim = query.shape
    kv_heads, kv_len = key.shape[1], key.shape[2]
    # half precision would overflow in products of logits beyond 6.5e4, and round those of a few hundred
    wide = torch.promote_types(query.dtype, torch.float32)
    work = work or wide
    # autocast would demote these products, and a finite mask value of fp32 overflows in bf16
    with torch.autocast(autocast_device(query), enabled=False):
        grouped = query.to(work).reshape(batch, kv_heads, heads // kv_heads * q_len, dim)
        scores = torch.matmul(grouped, key.to(work).transpose(2, 3)).view(batch, heads, q_len, kv_len)
        scores = scores.to(wide) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if bias is not None:
            scores = scores + narrowed(bias, wide)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        top = scores.detach().amax(dim=3, keepdim=True)
        sink = None
        if sinks is not None:
            sink = sinks.to(wide).reshape(1, -1, 1, 1)
            top = torch.maximum(top, sink.detach())
        top = top.masked_fill(torch.isinf(top), 0.0)
        weights = torch.exp(scores - top)
        total = weights.sum(dim=3, keepdim=True)
        if sink is not None:
            total = total + torch.exp(sink - top)
        return weights / total.masked_fill(total == 0, 1.0), top, total


def weighted(weights: Tensor, value: Tensor, dropout: float) -> Tensor:
    """The sum of values by weights `[batch, heads, q_len, kv_len]`, some of which are dropped."""
    batch, heads, q_len, kv_len = weights.shape
    kv_heads = value.shape[1]
    weights = weights.to(value.dtype)
    weights = F.dropout(weights, dropout) if dropout else weights
    with torch.autocast(autocast_device(value), enabled=False):
        grouped = weights.reshape(batch, kv_heads, heads // kv_heads * q_len, kv_len)
        return torch.matmul(grouped, value).view(batch, heads, q_len, value.shape[3])
