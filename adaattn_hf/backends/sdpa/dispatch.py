"""Which calls of torch's operator say what a structure says: a plain one, runs of a packed row, a masked one, bands."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ...attention.call import AttentionCall, AttentionResult
from ...attention.kind import BIAS, COMPILING, DROPOUT, OPAQUE, SINKS, SOFTCAP, CallKind
from ...attention.packing import FROM_FIRST
from ...attention.tracing import transform_at_work
from ..base import Kernel
from .kernels import bare_operator, dense_last, operator, steps_by_flash
from .masked import added, additive_mask, in_bands, masked_call
from .packed import layout_of, packed_attention, walks_runs

SHORT_KEYS = 128
"""Keys up to which a processor serves one query quickest by the plain operator; measured on two AVX-512 cores."""

Way = Callable[[AttentionCall], "Tensor | None"]
"""Maps a call of a settled structure to the output `[batch, q_len, heads, head_dim_v]`; None where it needs bands."""


def kernel_of(kind: CallKind) -> Kernel:
    """The cheapest exact way for calls of a kind."""
    if kind.features & (COMPILING | OPAQUE):
        return _traced
    way = way_of(kind)

    def attend(call: AttentionCall) -> AttentionResult:
        if transform_at_work():
            return _traced(call)
        structure = call.structure
        if structure.key_padding is not None or type(structure.q_offset) is not int:
            call = replace(call, structure=structure.simplified())
        if call.scaling <= 0:  # torch's causal CPU kernel hides keys by an infinity times the factor
            call = call.with_positive_scaling()
        out = way(call)
        return AttentionResult(in_bands(call) if out is None else out)

    return attend


def _traced(call: AttentionCall) -> AttentionResult:
    """For graphs, transforms and tensors without memory: nothing may be read, and only fixed numbers may decide."""
    if isinstance(call.scaling, (int, float)):
        call = call.with_positive_scaling()
    query, key, value, structure = call.query, call.key, call.value, call.structure
    simple = call.bias is None and call.softcap is None and call.sink_logits is None
    shape = structure.shape
    if simple and shape in ("full", "causal"):
        out = bare_operator(query, key, value, call.scaling, None, shape == "causal", call.dropout)
    elif simple and shape == "suffix" and structure.q_len == 1:
        stop = structure.offset() + 1
        out = masked_call(call, query, key[:, :, :stop], value[:, :, :stop], None, bare_operator)
    else:
        mask = structure.visible(device=query.device)
        if call.bias is not None:
            mask = added(call.bias, query).masked_fill(~mask, float("-inf"))
        out = masked_call(call, query, key, value, mask, bare_operator)
    return AttentionResult(out.transpose(1, 2))


def way_of(kind: CallKind) -> Way:
    """How calls of a kind are served outside of graphs."""
    one_product = kind.shape in ("full", "causal")
    if kind.features & (BIAS | SOFTCAP | SINKS) or (kind.features & DROPOUT and not one_product):
        return in_bands
    if kind.decode and (one_product or kind.shape == "suffix") and not kind.features & DROPOUT:
        return _step(kind)
    if one_product:
        causal = kind.shape == "causal"
        return lambda c: operator(c.query, c.key, c.value, c.scaling, None, causal, c.dropout).transpose(1, 2)
    if kind.light_training or (kind.shape == "ragged" and kind.holes is None and not kind.decode):
        return _masked
    fused = walks_runs(kind.device, kind.dtype, kind.head_dim, kind.head_dim_v)

    def runs(call: AttentionCall) -> Tensor | None:
        layout = call.structure.cached(layout_of, call.query.device)
        if layout is None or not (fused or layout.rule <= FROM_FIRST):
            return None
        return packed_attention(call.query, call.key, call.value, layout, call.scaling)

    return runs


def _step(kind: CallKind) -> Way:
    """One query: the operator's own CUDA kernels split the keys among programs and read grouped heads once."""
    flash, folds = steps_by_flash(kind), kind.device.type == "cpu" and kind.groups > 1

    def step(call: AttentionCall) -> Tensor | None:
        query, key, value, structure, kv_len = call.query, call.key, call.value, call.structure, call.structure.kv_len
        stop = min(kv_len, structure.offset() + 1) if structure.causal else kv_len
        if stop < 1:
            return None
        if stop < kv_len:
            key, value = key[:, :, :stop], value[:, :, :stop]
        if folds and stop > SHORT_KEYS:
            return masked_call(call, query, key, value, None).transpose(1, 2)
        if flash and torch.backends.cuda.flash_sdp_enabled():  # the user may have switched it off
            query, key, value = dense_last(query), dense_last(key), dense_last(value)
            out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, scale=call.scaling)[0]
            return out.transpose(1, 2)
        return operator(query, key, value, call.scaling).transpose(1, 2)

    return step


def _masked(call: AttentionCall) -> Tensor:
    query = call.query
    mask = call.structure.cached(additive_mask, query.dtype, query.device)
    return operator(query, call.key, call.value, call.scaling, mask).transpose(1, 2)
