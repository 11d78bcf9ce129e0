"""Gradients: a plain autograd function for eager mode, `torch.library` operators for traced graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from adaattn_hf.request import AttentionRequest
from adaattn_hf.structure import CallStructure

from . import call
from .call import Rules
from .rules import rules_of, with_extras

__all__ = ["Differentiable", "traced"]


def _sink_gradient(grad: Tensor, out: Tensor, lse: Tensor, sink_logits: Tensor) -> Tensor:
    """`-sum_i p_sink,i D_i` with `D = rowsum(dO * O)`, in fp32."""
    delta = (grad.float() * out.float()).sum(-1).transpose(1, 2)
    weight = torch.exp(sink_logits.float()[None, :, None] - lse)
    return -(weight * delta).sum((0, 2)).to(sink_logits.dtype)


class Differentiable(torch.autograd.Function):
    """Attention with the kernels' own backward; the log-sum-exp is returned without a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        scaling: float,
        rules: Rules,
    ) -> tuple[Tensor, Tensor]:
        """Computes the output and the log-sum-exp; `rules` already hold `bias` and `sinks`."""
        out, lse = call.forward(q, k, v, scaling, rules, need_lse=True)
        assert out is not None
        assert lse is not None
        ctx.save_for_backward(q, k, v, bias, sinks, out, lse)
        ctx.scaling, ctx.rules = scaling, rules
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of query, key, value, bias and learned sinks."""
        q, k, v, bias, sinks, out, lse = ctx.saved_tensors
        need_bias, need_sinks = ctx.needs_input_grad[3], ctx.needs_input_grad[4]
        found = call.backward(grad, q, k, v, out, lse, ctx.scaling, ctx.rules, need_bias=need_bias)
        dbias = None if found.bias is None else found.bias.sum_to_size(bias.shape).to(bias.dtype)
        dsinks = _sink_gradient(grad, out, lse, sinks) if need_sinks else None
        return found.q, found.k, found.v, dbias, dsinks, None, None


def _structure(
    q: Tensor,
    k: Tensor,
    causal: bool,
    q_offset: int,
    window: int | None,
    sinks: int,
    chunk: int | None,
    pads_queries: bool,
    offset: Tensor | None,
    chunk_start: Tensor | None,
    key_padding: Tensor | None,
    q_segments: Tensor | None,
    k_segments: Tensor | None,
    spans: Tensor | None,
    mask: Tensor | None,
) -> CallStructure:
    return CallStructure(
        q.shape[0],
        q.shape[2],
        k.shape[2],
        causal,
        q_offset if offset is None else offset,
        window,
        sinks,
        chunk,
        chunk_start,
        key_padding,
        pads_queries,
        q_segments,
        k_segments,
        spans,
        mask,
    )


@torch.library.custom_op("adaattn_native::attend", mutates_args=())
def attend_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sink_logits: Tensor | None,
    scaling: float,
    softcap: float,
    causal: bool,
    q_offset: int,
    window: int | None,
    sinks: int,
    chunk: int | None,
    pads_queries: bool,
    offset: Tensor | None,
    chunk_start: Tensor | None,
    key_padding: Tensor | None,
    q_segments: Tensor | None,
    k_segments: Tensor | None,
    spans: Tensor | None,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attention of a traced graph, with the fields of its structure."""
    rules = rules_of(
        _structure(
            q, k, causal, q_offset, window, sinks, chunk, pads_queries,
            offset, chunk_start, key_padding, q_segments, k_segments, spans, mask,
        )
    )  # fmt: skip
    out, lse = call.forward(
        q, k, v, scaling, with_extras(rules, bias, sink_logits, softcap, k.shape[2]), need_lse=True
    )
    assert out is not None
    assert lse is not None
    return out, lse


@attend_op.register_fake
def _attend_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, heads, q_len, _d = q.shape
    return q.new_empty((batch, q_len, heads, v.shape[3])), q.new_empty(
        (batch, heads, q_len), dtype=torch.float32
    )


@torch.library.custom_op("adaattn_native::attend_backward", mutates_args=())
def backward_op(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sink_logits: Tensor | None,
    scaling: float,
    softcap: float,
    causal: bool,
    q_offset: int,
    window: int | None,
    sinks: int,
    chunk: int | None,
    pads_queries: bool,
    offset: Tensor | None,
    chunk_start: Tensor | None,
    key_padding: Tensor | None,
    q_segments: Tensor | None,
    k_segments: Tensor | None,
    spans: Tensor | None,
    mask: Tensor | None,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and bias; the last is empty where it is not asked for."""
    rules = rules_of(
        _structure(
            q, k, causal, q_offset, window, sinks, chunk, pads_queries,
            offset, chunk_start, key_padding, q_segments, k_segments, spans, mask,
        )
    )  # fmt: skip
    rules = with_extras(rules, bias, sink_logits, softcap, k.shape[2])
    found = call.backward(grad, q, k, v, out, lse, scaling, rules, need_bias=need_bias)
    if bias is None or found.bias is None:
        return found.q, found.k, found.v, q.new_empty(0)
    return found.q, found.k, found.v, found.bias.sum_to_size(bias.shape).to(bias.dtype)


@backward_op.register_fake
def _backward_fake(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dbias = q.new_empty(0) if bias is None or not rest[-1] else bias.new_empty(bias.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dbias


_TENSORS, _STRUCTURE = 5, 7  # leading and trailing tensors of the operator


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:_TENSORS], *output, *inputs[-_STRUCTURE:])
    ctx.numbers = inputs[_TENSORS:-_STRUCTURE]
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    q, k, v, bias, sink_logits, out, lse, *tensors = ctx.saved_tensors
    need_bias = bias is not None and ctx.needs_input_grad[3]
    dq, dk, dv, dbias = backward_op(
        grad, out, lse, q, k, v, bias, sink_logits, *ctx.numbers, *tensors, need_bias
    )
    dsinks = None
    if sink_logits is not None and ctx.needs_input_grad[4]:
        dsinks = _sink_gradient(grad, out, lse, sink_logits)
    return dq, dk, dv, dbias if need_bias else None, dsinks, *[None] * (len(ctx.numbers) + len(tensors))


attend_op.register_autograd(_gradients, setup_context=_save)


def traced(request: AttentionRequest) -> tuple[Tensor, Tensor]:
    """The request as one operator, for a graph that is being traced."""
    s = request.structure
    offset = s.q_offset if isinstance(s.q_offset, Tensor) else None
    out, lse = attend_op(
        request.query,
        request.key,
        request.value,
        request.bias,
        request.sink_logits,
        request.scaling,
        request.softcap or 0.0,
        s.causal,
        0 if isinstance(s.q_offset, Tensor) else s.q_offset,
        s.window,
        s.sinks,
        s.chunk,
        s.pads_queries,
        offset,
        s.chunk_start,
        s.key_padding,
        s.q_segments,
        s.k_segments,
        s.spans,
        s.mask,
    )
    return out, lse
