"""What backward passes share: second derivatives are refused, never left out; and the gradient of learned sinks."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Refusing(torch.autograd.Function):
    """Passes the first tensors on, tied to all that they depend on, and raises an error in place of a derivative."""

    @staticmethod
    def forward(ctx: Any, error: Exception, count: int, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        """The first `count` tensors; a derivative with respect to any of them all is what is refused."""
        ctx.error = error
        return tuple(tensor.view_as(tensor) for tensor in tensors[:count] if tensor is not None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Raises the error."""
        raise ctx.error


def first_order(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Decorates the backward of an autograd function, as torch's `once_differentiable` does.

    That one ties its refusal to no input, so that `torch.autograd.grad` of a gradient skips it and returns derivatives
    without the part that goes through attention.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        with torch.no_grad():
            results = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return results
        at = [index for index, result in enumerate(results) if isinstance(result, Tensor)]
        inputs = [tensor for tensor in (*grads, *ctx.saved_tensors) if tensor is not None]
        error = RuntimeError(
            "second derivatives of attention: the fused backward passes have none, nor have those of stock sdpa; load "
            'the model with attn_implementation="adaattn_eager", which is differentiable any number of times'
        )
        tied = Refusing.apply(error, len(at), *(results[index] for index in at), *inputs)  # type: ignore[no-untyped-call]
        answers = dict(zip(at, tied, strict=True))
        return tuple(answers.get(index, result) for index, result in enumerate(results))

    return run


def sink_gradient(grad: Tensor, out: Tensor, lse: Tensor, sink_logits: Tensor) -> Tensor:
    """`-sum_i p_sink,i D_i` `[heads]` with `D = rowsum(dO * O)`: a sink draws weight and carries no value.

    `grad` and `out` are `[batch, q_len, heads, head_dim_v]`; `lse` `[batch, heads, q_len]`, in nats and with the sink
    in it, has the dtype that is computed in.
    """
    wide = lse.dtype
    delta = (grad.to(wide) * out.to(wide)).sum(dim=3).transpose(1, 2)
    share = torch.exp(sink_logits.to(wide).reshape(1, -1, 1) - lse)
    return -(share * delta).sum(dim=(0, 2)).reshape(sink_logits.shape).to(sink_logits.dtype)
