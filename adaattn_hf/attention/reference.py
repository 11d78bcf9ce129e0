"""Attention as it is written on paper, in double precision: the oracle of every test.

    S = scaling * Q K^T (softcapped) + bias,   P = softmax over visible keys (and a learned sink),   O = P V

Imports no backend and materialises everything.
"""

import torch

from .call import AttentionCall, AttentionResult
from .heads import reference_call
from .tracing import autocast_device


def attention(call: AttentionCall, dtype: torch.dtype = torch.float64) -> AttentionResult:
    """Exact attention in `dtype`, without dropout; `lse` in `dtype`, too, whether it was asked for or not.

    Rules per head are computed as `heads.reference_call` says.
    """
    call = reference_call(call.dequantised())
    query, key, value = (t.to(dtype) for t in (call.query, call.key, call.value))
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    with torch.autocast(autocast_device(query), enabled=False):
        scores = torch.matmul(query, key.transpose(2, 3)) * call.scaling
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        if call.bias is not None:
            scores = scores + call.bias.to(dtype)
        visible = call.structure.visible(device=query.device)
        scores = scores.masked_fill(~visible, float("-inf"))
        columns = scores
        if call.sink_logits is not None:
            sink = call.sink_logits.to(dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            # a learned sink takes part in the softmax but a row that sees no key still gives zeros
            columns = torch.cat([scores, sink], dim=3)
        top = columns.amax(dim=3, keepdim=True)
        top = torch.where(torch.isinf(top), torch.zeros_like(top), top).detach()
        weights = torch.exp(scores - top)
        total = torch.exp(columns - top).sum(dim=3, keepdim=True)
        lse = (top + torch.log(total)).squeeze(3)
        weights = weights / torch.where(total == 0, torch.ones_like(total), total)
        out = torch.matmul(weights, value).transpose(1, 2)
    return AttentionResult(out, lse)
