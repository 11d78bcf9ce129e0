"""Attention by operations that autograd and the compiler understand: no log-sum-exp, no merging.

Serves traced graphs, where no data may be read, and attention dropout, which no fused CPU kernel has.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...attention.request import AttentionRequest
from ...attention.tap import autocast_device
from .kernels import repeated, splits_groups
from .tiles import Part, Program, bias_of, dense_part


def plain_call(
    query: Tensor, key: Tensor, value: Tensor, request: AttentionRequest, *, causal: bool
) -> Tensor:
    """One operator call without a mask, `[batch, heads, q_len, head_dim_v]`, of a request or a part of it."""
    if query.shape[2] > 1 and splits_groups(query.device.type, query.dtype):
        key, value = repeated(key, query), repeated(value, query)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        dropout_p=request.dropout,
        is_causal=causal,
        scale=request.scaling,
        enable_gqa=bool(query.shape[1] != key.shape[1]),
    )


def masked_call(
    request: AttentionRequest, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> Tensor:
    """One operator call; where grouped heads meet a mask, a single query takes its group's heads as rows."""
    batch, heads, q_len, _ = query.shape
    groups = heads // key.shape[1]
    if request.softcap is not None or request.sink_logits is not None:
        return _written_out(request, query, key, value, mask)
    # a CUDA device shares work out by heads: folded into rows, they would leave most of it idle
    folded = groups > 1 and q_len == 1 and (mask is None or mask.shape[1] == 1)
    folded = folded and not (query.is_cuda and torch.compiler.is_compiling())
    if folded:
        query = query.reshape(batch, heads // groups, groups, -1)
    elif groups > 1 and mask is not None:
        key, value = repeated(key, query), repeated(value, query)
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=request.dropout,
        scale=request.scaling,
        enable_gqa=bool(groups > 1) and mask is None and not folded,
    )
    return out.reshape(batch, heads, 1, value.shape[3]) if folded else out


def _written_out(
    request: AttentionRequest, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> Tensor:
    """Softcapped scores and learned sinks, as separate operations."""
    batch, heads, q_len, dim = query.shape
    kv_heads = key.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    # A product in float16 overflows at logits that the softmax of it would bear; one in bfloat16 does not, and is what
    # the matrix units of a device compute many times as fast.
    own = query.is_cuda and query.dtype == torch.bfloat16 and torch.compiler.is_compiling()
    work = query.dtype if own else wide
    with torch.autocast(autocast_device(query), enabled=False):
        grouped = query.to(work).reshape(batch, kv_heads, heads // kv_heads * q_len, dim)
        scores = torch.matmul(grouped, key.to(work).transpose(2, 3)).view(batch, heads, q_len, key.shape[2])
        scores = scores.to(wide) * request.scaling
        if request.softcap is not None:
            scores = request.softcap * torch.tanh(scores / request.softcap)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        top = scores.detach().amax(dim=3, keepdim=True)
        sink = None
        if request.sink_logits is not None:
            sink = request.sink_logits.to(wide).reshape(1, -1, 1, 1)
            top = torch.maximum(top, sink.detach())
        top = top.masked_fill(torch.isinf(top), 0.0)
        weights = torch.exp(scores - top)
        total = weights.sum(dim=3, keepdim=True)
        if sink is not None:
            total = total + torch.exp(sink - top)
        weights = (weights / total.masked_fill(total == 0, 1.0)).to(value.dtype)
        weights = F.dropout(weights, request.dropout) if request.dropout else weights
        rows = weights.reshape(batch, kv_heads, heads // kv_heads * q_len, key.shape[2])
        return torch.matmul(rows, value).view(batch, heads, q_len, value.shape[3])


def run_traced(program: Program, request: AttentionRequest) -> Tensor:
    """A program without merging parts, `[batch, heads, q_len, head_dim_v]`."""
    if program.dense:
        query = request.query
        dense = (dense_part(part, request.structure, query.device, query.dtype) for part in program.parts)
        program = program._replace(parts=tuple(dense))
    batches: list[Tensor] = []
    row = 0
    for first, parts in _by_row(program):
        rows = parts[0].rows
        if first > row:
            batches.append(_zeros(request, first - row, request.structure.q_len))
        batches.append(_row_group(parts, request))
        row = first + rows
    if row < request.structure.batch:
        batches.append(_zeros(request, request.structure.batch - row, request.structure.q_len))
    return batches[0] if len(batches) == 1 else torch.cat(batches, dim=0)


def _by_row(program: Program) -> list[tuple[int, list[Part]]]:
    groups: dict[int, list[Part]] = {}
    for part in program.parts:
        groups.setdefault(part.row, []).append(part)
    return [(row, sorted(parts, key=lambda part: part.q_start)) for row, parts in sorted(groups.items())]


def _row_group(parts: list[Part], request: AttentionRequest) -> Tensor:
    """The output of neighbouring batch rows that share their parts; queries between the parts see nothing."""
    pieces: list[Tensor] = []
    place, rows = 0, parts[0].rows
    for part in parts:
        if part.q_start > place:
            pieces.append(_zeros(request, rows, part.q_start - place))
        pieces.append(_piece(part, request))
        place = part.q_start + part.q_len
    if place < request.structure.q_len:
        pieces.append(_zeros(request, rows, request.structure.q_len - place))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)


def _zeros(request: AttentionRequest, rows: int, q_len: int) -> Tensor:
    return request.query.new_zeros((rows, request.query.shape[1], q_len, request.value.shape[3]))


def _piece(part: Part, request: AttentionRequest) -> Tensor:
    rows = slice(part.row, part.row + part.rows)
    own = slice(part.k_start, part.k_start + part.k_len)
    query = request.query[rows, :, part.q_start : part.q_start + part.q_len]
    key, value = request.key[rows, :, own], request.value[rows, :, own]
    if part.sinks:
        front = slice(part.sink_start, part.sink_start + part.sinks)
        key = torch.cat([request.key[rows, :, front], key], dim=2)
        value = torch.cat([request.value[rows, :, front], value], dim=2)
    mask = part.mask
    bias = request.bias
    if bias is not None:
        columns = bias_of(bias, part)
        if part.sinks and bias.shape[3] > 1:
            sinks = part._replace(k_start=part.sink_start, k_len=part.sinks)
            columns = torch.cat([bias_of(bias, sinks), columns], dim=3)
        columns = columns.to(query.dtype)
        mask = columns if mask is None else columns + mask
    if part.causal and request.softcap is None and request.sink_logits is None and mask is None:
        return plain_call(query, key, value, request, causal=True)
    return masked_call(request, query, key, value, mask)
