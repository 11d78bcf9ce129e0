"""Gradients of the kernels in eager mode: an autograd function that recomputes the weights from the log-sum-exp."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...attention.gradients import first_order, sink_gradient
from . import entry
from .rules import Rules


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
        out, lse = entry.forward(q, k, v, scaling, rules, need_lse=True)
        assert lse is not None
        ctx.save_for_backward(q, k, v, bias, sinks, out, lse)
        ctx.scaling, ctx.rules = scaling, rules
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of query, key, value, bias and learned sinks."""
        q, k, v, bias, sinks, out, lse = ctx.saved_tensors
        need_bias, need_sinks = ctx.needs_input_grad[3], ctx.needs_input_grad[4]
        saved = q, k, v, out, lse
        dq, dk, dv, dbias = entry.backward(grad, saved, ctx.scaling, ctx.rules, need_bias=need_bias)
        if dbias is not None:
            dbias = dbias.sum_to_size(bias.shape).to(bias.dtype)
        dsinks = sink_gradient(grad, out, lse, sinks) if need_sinks else None
        return dq, dk, dv, dbias, dsinks, None, None
