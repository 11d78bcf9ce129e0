"""Runs a program with a kernel that returns the log-sum-exp, forward and backward.

Autograd sees one operation: it keeps query, key, value, output and log-sum-exp, and the backward walks the parts again.
With the output and log-sum-exp of the whole row at hand the gradient of a part needs nothing of the other parts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...attention.gradients import first_order, sink_gradient
from ...attention.structure import CallStructure
from .kernels import Kernel, Rectangle
from .tiles import EMPTY, Part, Program, bias_of, dense_part, empty_rows


def _view(t: Tensor, part: Part, start: int, length: int) -> Tensor:
    """Rows `start … start + length` of `[batch, heads, len, dim]`; the repetitions of a part become its batch."""
    _, heads, _, dim = t.shape
    by_row, by_head, by_place, by_dim = t.stride()
    origin = t.storage_offset() + part.row * by_row + start * by_place
    if part.count == 1:
        return t.as_strided((part.rows, heads, length, dim), (by_row, by_head, by_place, by_dim), origin)
    return t.as_strided(
        (part.count, heads, length, dim), (part.q_len * by_place, by_head, by_place, by_dim), origin
    )


def _keys(t: Tensor, part: Part) -> Tensor:
    own = _view(t, part, part.k_start, part.k_len)
    if not part.sinks:
        return own
    sinks = t[part.row : part.row + part.rows, :, part.sink_start : part.sink_start + part.sinks]
    return torch.cat([sinks, own], dim=2)


def _lse_view(lse: Tensor, part: Part) -> Tensor:
    return _view(lse.unsqueeze(3), part, part.q_start, part.q_len).squeeze(3)


def _mask(part: Part, bias: Tensor | None) -> Tensor | None:
    """The part's mask with its piece of the bias."""
    if bias is None:
        return part.mask
    rows = bias_of(bias, part)
    if part.mask is not None:
        return rows + part.mask
    return rows.expand(-1, -1, part.q_len, part.k_len)


def _rectangle(
    part: Part, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scaling: float
) -> Rectangle:
    rows = _view(query, part, part.q_start, part.q_len)
    return Rectangle(rows, _keys(key, part), _keys(value, part), _mask(part, bias), part.causal, scaling)


def _empty(part: Part, mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Rows that see nothing; a bias may hide keys, too."""
    return part.empty if bias is None or mask is None else empty_rows(mask)


def is_single(program: Program, structure: CallStructure) -> bool:
    """One part answers the whole call."""
    if len(program.parts) != 1 or program.dense:
        return False
    part = program.parts[0]
    return part.rows == structure.batch and part.q_len == structure.q_len and not part.sinks


def run_single(
    kernel: Kernel,
    part: Part,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    bias: Tensor | None,
) -> Tensor:
    """`out` `[batch, q_len, heads, head_dim_v]` of a program of one part."""
    if part.k_len != key.shape[2]:
        own = slice(part.k_start, part.k_start + part.k_len)
        key, value = key[:, :, own], value[:, :, own]
    mask = part.mask if bias is None else _mask(part, bias)
    return kernel.forward(Rectangle(query, key, value, mask, part.causal, scaling))[0].transpose(1, 2)


def run_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    sink_logits: Tensor | None,
    kernel: Kernel,
    program: Program,
    structure: CallStructure,
    scaling: float,
    *,
    need_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """`out` `[batch, q_len, heads, head_dim_v]` and, where asked for, `lse` with `EMPTY` for rows that see nothing."""
    batch, heads, q_len, _ = query.shape
    need_lse = need_lse or program.merges or sink_logits is not None
    parts = program.parts
    whole = len(parts) == 1 and program.covered and parts[0].count == 1
    make = torch.empty if program.covered else torch.zeros
    out: Tensor | None = None
    lse: Tensor | None = None
    if not whole:
        out = make((batch, q_len, heads, value.shape[3]), dtype=query.dtype, device=query.device)
        if need_lse:
            wide = torch.promote_types(query.dtype, torch.float32)
            lse = torch.full((batch, heads, q_len), EMPTY, dtype=wide, device=query.device)
    for part in parts:
        if program.dense:
            part = dense_part(part, structure, query.device, query.dtype)
        rectangle = _rectangle(part, query, key, value, bias, scaling)
        piece, own = kernel.forward(rectangle)
        if need_lse:
            empty = _empty(part, rectangle.mask, bias)
            if empty is not None:
                own = own.masked_fill(empty, EMPTY)
        if out is None:
            out, lse = piece.transpose(1, 2), own if need_lse else None
            break
        place = _view(out.transpose(1, 2), part, part.q_start, part.q_len)
        if lse is None:
            place.copy_(piece)
            continue
        known = _lse_view(lse, part)
        if part.merge:
            share = torch.sigmoid(own - known).unsqueeze(3)
            place.copy_(torch.lerp(place.to(share.dtype), piece.to(share.dtype), share))
            known.copy_(torch.logaddexp(own, known))
        else:
            place.copy_(piece)
            known.copy_(own)
    assert out is not None  # programs without parts are answered before
    if sink_logits is not None and lse is not None:
        sink = sink_logits.to(lse.dtype).reshape(1, -1, 1)
        out = out * torch.sigmoid(lse - sink).transpose(1, 2).unsqueeze(3).to(out.dtype)
        lse = torch.logaddexp(lse, sink)
    return out, lse


def run_backward(
    kernel: Kernel,
    program: Program,
    structure: CallStructure,
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    bias_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key, value and bias. `grad` and `out` are `[batch, q_len, heads, head_dim_v]`."""
    # several parts add into the same place: half precision would round each time
    wide = torch.promote_types(query.dtype, torch.float32) if len(program.parts) > 1 else query.dtype
    grad, out = grad.transpose(1, 2), out.transpose(1, 2)
    grad_query, grad_key, grad_value = (
        torch.zeros(t.shape, dtype=wide, device=t.device) for t in (query, key, value)
    )
    grad_bias = (
        torch.zeros(bias.shape, dtype=wide, device=bias.device)
        if bias is not None and bias_gradient
        else None
    )
    for part in program.parts:
        if program.dense:
            part = dense_part(part, structure, query.device, query.dtype)
        grads = kernel.backward(
            _view(grad, part, part.q_start, part.q_len),
            _view(out, part, part.q_start, part.q_len),
            _lse_view(lse, part).contiguous(),
            _rectangle(part, query, key, value, bias, scaling),
        )
        _view(grad_query, part, part.q_start, part.q_len).add_(grads.query)
        _add_keys(grad_key, part, grads.key)
        _add_keys(grad_value, part, grads.value)
        if grad_bias is not None and grads.bias is not None:
            place = bias_of(grad_bias, part)
            place.add_(grads.bias.sum_to_size(place.shape))
    return (
        grad_query.to(query.dtype),
        grad_key.to(key.dtype),
        grad_value.to(value.dtype),
        None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
    )


def _add_keys(total: Tensor, part: Part, grad: Tensor) -> None:
    if part.sinks:
        rows = slice(part.row, part.row + part.rows)
        total[rows, :, part.sink_start : part.sink_start + part.sinks] += grad[:, :, : part.sinks]
        grad = grad[:, :, part.sinks :]
    if part.count == 1:
        _view(total, part, part.k_start, part.k_len).add_(grad)
        return
    # the repetitions may overlap
    for index in range(part.count):
        start = part.k_start + index * part.q_len
        total[part.row, :, start : start + part.k_len] += grad[index]


class Fused(torch.autograd.Function):
    """A program as one differentiable operation; differentiable once, and not through the log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        sink_logits: Tensor | None,
        kernel: Kernel,
        program: Program,
        structure: CallStructure,
        scaling: float,
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp."""
        out, lse = run_forward(
            query, key, value, bias, sink_logits, kernel, program, structure, scaling, need_lse=True
        )
        assert lse is not None  # it is asked for
        ctx.save_for_backward(query, key, value, bias, sink_logits, out, lse)
        ctx.kernel, ctx.program, ctx.structure, ctx.scaling = kernel, program, structure, scaling
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        """Gradients by the parts."""
        query, key, value, bias, sink_logits, out, lse = ctx.saved_tensors
        grad_sink = None if sink_logits is None else sink_gradient(grad, out, lse, sink_logits)
        grads = run_backward(
            ctx.kernel, ctx.program, ctx.structure, grad.contiguous(), query, key, value, ctx.scaling, bias, out, lse,
            ctx.needs_input_grad[3],
        )  # fmt: skip
        return (*grads, grad_sink, None, None, None, None)
