"""The kernels as operators of torch, for graphs that are traced.

Registered when the package is imported, never while a graph is traced, and from torch alone: the library behind them
opens when one of them first runs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...attention.call import NAMESPACE, OPERANDS, AttentionCall, AttentionResult, empty_output
from ..base import zero_output


def _call(inputs: Sequence[Any]) -> AttentionCall:
    call = AttentionCall.of_operands(*inputs)
    call.need_lse = True
    call.check()
    return call


@torch.library.custom_op(f"{NAMESPACE}::native_attend", mutates_args=(), schema=f"({OPERANDS}) -> (Tensor, Tensor)")
def attend_op(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a call in a traced graph."""
    from .launch import computed

    call = _call(inputs)
    out, lse = zero_output(call) if call.is_empty else computed(call)
    assert lse is not None
    return out, lse


@attend_op.register_fake
def _attend_fake(*inputs: Any) -> tuple[Tensor, Tensor]:
    return empty_output(*inputs), inputs[0].new_empty(inputs[0].shape[:3], dtype=torch.float32)


@torch.library.custom_op(
    f"{NAMESPACE}::native_attend_backward",
    mutates_args=(),
    schema=f"(bool need_bias, Tensor grad, Tensor out, Tensor lse, {OPERANDS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def backward_op(
    need_bias: bool, grad: Tensor, out: Tensor, lse: Tensor, *inputs: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and bias; the last is empty where it is not asked for."""
    from .launch import backward, rules_of

    call, bias = _call(inputs), inputs[3] if need_bias else None
    saved = call.query, call.key, call.value, out, lse
    dq, dk, dv, dbias = backward(grad, saved, call.scaling, rules_of(call), bias=bias)
    return dq, dk, dv, grad.new_empty(0) if dbias is None else dbias


@backward_op.register_fake
def _backward_fake(
    need_bias: bool, grad: Tensor, out: Tensor, lse: Tensor, *inputs: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, bias = inputs[:4]
    dbias = q.new_empty(0) if bias is None or not need_bias else bias.new_empty(bias.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dbias


_TENSORS, _STRUCTURE = 5, 8  # leading and trailing tensors of the operator


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:_TENSORS], *output, *inputs[-_STRUCTURE:])
    ctx.numbers = inputs[_TENSORS:-_STRUCTURE]
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    q, k, v, bias, sink_logits, out, lse, *tensors = ctx.saved_tensors
    need_bias = bias is not None and ctx.needs_input_grad[3]
    dq, dk, dv, dbias = backward_op(need_bias, grad, out, lse, q, k, v, bias, sink_logits, *ctx.numbers, *tensors)
    dsinks = None
    if sink_logits is not None and ctx.needs_input_grad[4]:
        from ...attention.gradients import sink_gradient  # of training alone

        dsinks = sink_gradient(grad, out, lse, sink_logits)
    return dq, dk, dv, dbias if need_bias else None, dsinks, *[None] * (len(ctx.numbers) + len(tensors))


attend_op.register_autograd(_gradients, setup_context=_save)


def traced(call: AttentionCall) -> AttentionResult:
    """The call as one operator, for a graph that is being traced."""
    return AttentionResult(*attend_op(*call.operands()))
