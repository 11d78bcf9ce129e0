"""Attention with gradients: the forward kernel keeps the log-sum-exp, two more compute the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...attention.gradients import first_order
from ...attention.heads import HeadWindows
from ...attention.request import AttentionRequest, AttentionResult
from ...attention.structure import CallStructure
from ..base import derived_on
from .backward import of_keys, of_queries, prepare
from .descriptors import descriptor_of
from .launcher import Launcher, aligned
from .prefill import attend_forward
from .sizes import padded, scale_of, tile_on
from .tables import Cut, find_entries, window_table

launch_prepare, launch_of_keys, launch_of_queries = Launcher(prepare), Launcher(of_keys), Launcher(of_queries)


def attend_with_gradients(request: AttentionRequest, windows: HeadWindows | None) -> AttentionResult:
    """Attention whose output, and log-sum-exp if it is asked for, can be differentiated."""
    if request.scaling <= 0:
        # the kernels divide by it, and take the largest score by the largest product
        query = -request.query if request.scaling else request.query * 0
        request = replace(request, query=query, scaling=-request.scaling or 1.0)
    out, lse = _Attention.apply(  # type: ignore[no-untyped-call]
        request.query, request.key, request.value, request.sink_logits, request, windows
    )
    return AttentionResult(out, lse if request.need_lse else None)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink: Tensor | None,
        request: AttentionRequest,
        windows: HeadWindows | None,
    ) -> tuple[Tensor, Tensor | None]:
        out, lse = attend_forward(request, windows, keep_lse=True)
        ctx.save_for_backward(query, key, value, sink, out, lse)
        ctx.call = request.structure, request.scaling, request.softcap, windows
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, out, lse = ctx.saved_tensors
        grad = torch.zeros_like(out) if grad is None else grad
        return (*_gradients(ctx.call, inputs, (out, lse), (grad, grad_lse)), None, None)


def _gradients(
    call: tuple[CallStructure, float, float | None, HeadWindows | None],
    inputs: Sequence[Tensor],
    outputs: tuple[Tensor, Tensor],
    grads: tuple[Tensor, Tensor | None],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of queries, keys, values and learned sinks."""
    query, key, value, sink = inputs
    out, lse = outputs
    grad, grad_lse = grads
    structure, scaling, softcap, windows = call
    segments = structure.segments() or ()
    batch, heads, q_len, dim = query.shape
    kv_heads, kv_len, value_dim = key.shape[1], key.shape[2], value.shape[3]
    pad, value_pad = padded(dim), padded(value_dim)
    capped = softcap is not None
    shift, sums = torch.empty((2, batch, heads, q_len), dtype=torch.float32, device=query.device)
    arguments: tuple[Any, ...] = (
        out, grad, lse, grad_lse.contiguous() if grad_lse is not None else lse, shift, sums,
        *out.stride(), *grad.stride(), q_len, 1.4426950408889634 if capped else 1.0 / scaling,
    )  # fmt: skip
    facts: dict[str, Any] = {
        "DIM_V": value_dim, "PAD_V": value_pad, "HAS_GRAD_LSE": grad_lse is not None, "BLOCK": 64, "num_warps": 4,
    }  # fmt: skip
    # saved tensors may come back at any address
    even = query.is_cuda and aligned(query, key, value, out, lse, grad, grad_lse, shift, sums)
    variant = (query.dtype, arguments[6:-1]) if even else None
    launch_prepare((batch, heads, -(-q_len // 64)), arguments, facts, variant)
    columns = sum(s.k_len for s in segments) == batch * kv_len
    dq, dk, dv = (
        (like.new_empty if whole else like.new_zeros)((batch, length, count, width)).transpose(1, 2)
        for like, whole, length, count, width in (
            (query, bool(segments), q_len, heads, dim),
            (key, columns, kv_len, kv_heads, dim),
            (value, columns, kv_len, kv_heads, value_dim),
        )
    )
    if segments:
        facts = {
            "GROUPS": heads // kv_heads, "DIM": dim, "DIM_V": value_dim, "PAD": pad, "PAD_V": value_pad,
            "CAUSAL": structure.causal, "WINDOW": windows is not None, "HAS_CAP": capped,
        }  # fmt: skip
        by_head = grad.transpose(1, 2)
        strides = (*query.stride(), *key.stride(), *value.stride(), *grad.stride())
        scales = scale_of(scaling, softcap), float(scaling), float(softcap or 0.0)
        width = max(pad, value_pad) * query.itemsize
        runs = windows is not None or len(segments) > batch
        tile = tile_on("of_keys of runs" if runs else "of_keys", width, query.device)
        table, entries = derived_on(structure, query.device, find_entries, Cut("keys", tile.columns), kv_heads)
        limits = table if windows is None else window_table(windows, query.device)
        q_bulk, g_bulk = descriptor_of(query, tile.rows), descriptor_of(by_head, tile.rows)
        bulk = q_bulk is not None and g_bulk is not None
        numbers = *strides, *dk.stride()[:3], *dv.stride()[:3], *lse.stride()[:2]
        arguments = (
            query, key, value, grad, q_bulk if bulk else query, g_bulk if bulk else grad, shift, sums, dk, dv,
            table, entries, limits, *numbers, *scales,
        )  # fmt: skip
        variant = (query.dtype, numbers) if even else None
        launch_of_keys((len(entries),), arguments, {**facts, "BULK": bulk, **tile.constants()}, variant)
        tile = tile_on("of_queries", width, query.device)
        table, entries = derived_on(structure, query.device, find_entries, Cut("queries", tile.rows), kv_heads)
        numbers = *strides, *dq.stride()[:3], *lse.stride()[:2]
        variant = (query.dtype, numbers) if even else None
        arguments = query, key, value, grad, shift, sums, dq, table, entries, limits, *numbers, *scales
        programs = heads // kv_heads * len(entries)
        launch_of_queries((programs,), arguments, {**facts, **tile.constants()}, variant)
    d_sink = None
    if sink is not None:
        # d(sink) = sum of p_sink * -rowsum(dO * O), which `sums` holds
        weight = torch.exp(sink.float()[None, :, None] - lse)
        d_sink = (weight * sums).sum((0, 2)).to(sink.dtype)
    return dq, dk, dv, d_sink
