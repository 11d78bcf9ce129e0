"""Packed attention in a traced graph, which cannot read lengths: one operator on CPUs, elsewhere a mask of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .arguments import Options
from .attention.call import AttentionCall, AttentionResult
from .attention.gradients import sink_gradient
from .attention.structure import MaskStructure
from .backends.base import zero_output
from .backends.native import launch
from .backends.native.launch import computed, rules_of
from .backends.native.library import missing
from .run import attend, packed_runs

# Kernels of several names or versions may be loaded beside one another: each registers under its own.
_NAMESPACE = __name__.partition(".")[0]


_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor cu_q, Tensor cu_k, Tensor? sinks, "
    "float scaling, float softcap, bool causal, int? window"
)


def _call(inputs: Sequence[Any]) -> AttentionCall:
    """The call of packed sequences."""
    q, k, v, cu_q, cu_k, sinks, scaling, softcap, causal, window = inputs
    structure = packed_runs(tuple(cu_q.tolist()), tuple(cu_k.tolist()), q.shape[0], k.shape[0], causal, window)
    query, key, value = map(_heads_first, (q, k, v))
    cap = softcap or None
    call = AttentionCall(query, key, value, structure, scaling, softcap=cap, sink_logits=sinks, need_lse=True)
    call.check()
    return call


def _heads_first(t: Tensor) -> Tensor:
    """`[tokens, heads, size]` as one batch row `[1, heads, tokens, size]`."""
    return t.unsqueeze(0).transpose(1, 2)


@torch.library.custom_op(f"{_NAMESPACE}::varlen", mutates_args=(), schema=f"({_INPUTS}) -> (Tensor, Tensor)")
def varlen(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Output `[q_tokens, heads, head_dim_v]` and log-sum-exp `[heads, q_tokens]` of packed sequences."""
    call = _call(inputs)
    out, lse = zero_output(call) if call.is_empty else computed(call)
    assert lse is not None
    return out[0], lse[0]


@varlen.register_fake
def _varlen_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    tokens, heads, _size = q.shape
    return q.new_empty((tokens, heads, v.shape[2])), q.new_empty((heads, tokens), dtype=torch.float32)


@torch.library.custom_op(
    f"{_NAMESPACE}::varlen_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor out, Tensor lse, {_INPUTS}) -> (Tensor, Tensor, Tensor)",
)
def varlen_backward(grad: Tensor, out: Tensor, lse: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    call = _call(inputs)
    saved = call.query, call.key, call.value, out[None], lse[None]
    gradients = launch.backward(grad[None], saved, call.scaling, rules_of(call))[:3]
    dq, dk, dv = (gradient[0].transpose(0, 1).contiguous() for gradient in gradients)
    return dq, dk, dv


@varlen_backward.register_fake
def _backward_fake(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:6], *output)
    ctx.numbers = inputs[6:]
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    q, k, v, cu_q, cu_k, sinks, out, lse = ctx.saved_tensors
    dq, dk, dv = varlen_backward(grad.contiguous(), out, lse, q, k, v, cu_q, cu_k, sinks, *ctx.numbers)
    dsinks = None
    if sinks is not None and ctx.needs_input_grad[5]:
        dsinks = sink_gradient(grad[None], out[None], lse[None], sinks)
    return dq, dk, dv, None, None, dsinks, None, None, None, None


varlen.register_autograd(_gradients, setup_context=_save)


def traced_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, asked: Options, *, need_lse: bool
) -> AttentionResult:
    """Packed attention for a graph that is being traced, `[q_tokens, heads, head_dim_v]` and `[heads, q_tokens]`.

    Raises:
        ValueError: The log-sum-exp is asked for on another device than a CPU.
    """
    cap, sinks = asked.softcap, asked.sink_logits
    if q.is_cpu and _native_is_here():
        out, lse = varlen(q, k, v, cu_q, cu_k, sinks, asked.scaling, cap or 0.0, asked.causal, asked.window)
        return AttentionResult(out, lse)
    if need_lse:
        raise ValueError(
            "return_attn_probs: got True in a compiled graph without the native kernels; leave it out or do not compile"
        )
    return masked_varlen(q, k, v, cu_q, cu_k, asked)


def masked_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, asked: Options, *, need_lse: bool = False
) -> AttentionResult:
    """Packed attention by a mask made of operations on tensors alone, so that whoever traces sees all of them."""
    i, j = torch.arange(q.shape[0], device=cu_q.device), torch.arange(k.shape[0], device=cu_k.device)
    last = cu_q.shape[0] - 1
    of_i, of_j = torch.searchsorted(cu_q, i, right=True), torch.searchsorted(cu_k, j, right=True)
    # where each query stands in the keys: the ends of its sequence lie on one another
    end = of_i.clamp(max=last)
    p = (i - cu_q[end] + cu_k[end])[:, None]
    together = (of_i[:, None] == of_j[None]) & (of_i <= last)[:, None]
    mask = (together & within(p, j[None], asked))[None, None]
    structure = MaskStructure(1, q.shape[0], k.shape[0], mask=mask)
    out, lse = attend(structure, *map(_heads_first, (q, k, v)), asked, need_lse=need_lse)
    return AttentionResult(out[0], None if lse is None else lse[0])


@torch.compiler.assume_constant_result
def _native_is_here() -> bool:
    """A traced graph cannot look for a library, and need not."""
    return not missing()


def within(p: Tensor, j: Tensor, asked: Options) -> Tensor:
    """Whether queries at positions `p` `[q_len, 1]` see keys `j` `[1, kv_len]`, by causality and window."""
    keep = j <= p if asked.causal else torch.ones_like(p == j)
    if asked.window is not None:
        keep = keep & ((j > p - asked.window) if asked.causal else ((p - j).abs() < asked.window))
    return keep
