"""Which calls of torch's operator say what a structure says: a plain one, runs of a packed row, a masked one, bands."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...attention.packing import FROM_FIRST
from ...attention.request import AttentionRequest, AttentionResult, CallSpec
from ...attention.structure import CallStructure
from ...attention.tracing import holds_no_memory, transform_at_work
from ..base import nothing_seen, spec_of
from . import limits
from .decode import attend_few
from .kernels import bare_operator, dense_last, operator, steps_by_flash
from .masked import added, additive_mask, in_bands, masked_call
from .packed import layout_for, packed_attention, walks_runs


def attend(request: AttentionRequest) -> AttentionResult:
    """Attention by the cheapest exact way."""
    query, key, value = request.query, request.key, request.value
    simple = request.bias is None and request.softcap is None and request.sink_logits is None
    # what the ways below read of tensors is nothing that a graph or a transform may rest on
    if torch.compiler.is_compiling() or transform_at_work() or holds_no_memory(query, key, value):
        return AttentionResult(_traced(request, simple).transpose(1, 2))
    if request.asks_nothing:
        return nothing_seen(request)
    structure = request.structure.settled()
    if simple and request.dropout and structure.kind in ("causal", "full"):
        causal = structure.kind == "causal"
        out = operator(query, key, value, request.scaling, causal=causal, dropout=request.dropout)
        return AttentionResult(out.transpose(1, 2))
    if simple and not request.dropout:
        way = way_of(spec_of(request.with_tensors(query, key, value, structure)))
        found = way(query, key, value, request.scaling, structure)
        if found is not None:
            return AttentionResult(found)
    return AttentionResult(in_bands(request, structure))


def _traced(request: AttentionRequest, simple: bool) -> Tensor:
    """A traced graph: nothing may be read, and only fixed numbers may decide."""
    query, key, value, structure = request.query, request.key, request.value, request.structure
    kind = structure.kind
    if simple and kind in ("full", "causal"):
        return bare_operator(query, key, value, request.scaling, causal=kind == "causal", dropout=request.dropout)
    if simple and kind == "suffix" and structure.q_len == 1:
        stop = structure.offset() + 1
        return masked_call(request, query, key[:, :, :stop], value[:, :, :stop], None, bare_operator)
    mask = structure.visible(device=query.device)
    if request.bias is not None:
        mask = added(request.bias, query).masked_fill(~mask, float("-inf"))
    return masked_call(request, query, key, value, mask, bare_operator)


Way = Callable[[Tensor, Tensor, Tensor, float, CallStructure], "Tensor | None"]
"""Maps query, key, value, scaling and a settled structure to the output `[batch, q_len, heads, head_dim_v]`; None where
the structure of a call needs bands."""


def way_of(spec: CallSpec) -> Way:
    """How ordinary calls of a kind are served."""
    if spec.kind in ("full", "causal", "suffix") and spec.decode:
        return _step(spec)
    if spec.kind in ("full", "causal"):
        return _causal if spec.kind == "causal" else _full
    if spec.decode and spec.device == "cpu":
        return attend_few
    if spec.light_training or (spec.kind == "ragged" and spec.holes is None and not spec.decode):
        return _masked
    return _over_runs(walks_runs(spec.device, spec.dtype, spec.head_dim, spec.head_dim_v))


def _full(query: Tensor, key: Tensor, value: Tensor, scaling: float, structure: CallStructure) -> Tensor:
    return operator(query, key, value, scaling).transpose(1, 2)


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float, structure: CallStructure) -> Tensor:
    return operator(query, key, value, scaling, causal=True).transpose(1, 2)


def _step(spec: CallSpec) -> Way:
    """One query: the operator's own CUDA kernels split the keys among programs and read grouped heads once."""
    flash, cpu = steps_by_flash(spec), spec.device == "cpu"
    folds = cpu and not (spec.groups == 1 and spec.dtype == torch.float32)

    def attend(query: Tensor, key: Tensor, value: Tensor, scaling: float, structure: CallStructure) -> Tensor | None:
        kv_len = structure.kv_len
        stop = min(kv_len, structure.offset() + 1) if structure.causal else kv_len
        if stop < 1:
            return None
        if folds and stop > limits.SHORT_KEYS:
            return attend_few(query, key, value, scaling, structure)
        if stop < kv_len:
            key, value = key[:, :, :stop], value[:, :, :stop]
        if flash and torch.backends.cuda.flash_sdp_enabled():  # the user may have switched it off
            query, key, value = dense_last(query), dense_last(key), dense_last(value)
            out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, scale=scaling)[0]
            return out.transpose(1, 2)
        return operator(query, key, value, scaling).transpose(1, 2)

    return attend


def _masked(query: Tensor, key: Tensor, value: Tensor, scaling: float, structure: CallStructure) -> Tensor:
    mask = structure.derived(additive_mask, query.dtype, query.device)
    return operator(query, key, value, scaling, mask).transpose(1, 2)


def _over_runs(fused: bool) -> Way:

    def attend(query: Tensor, key: Tensor, value: Tensor, scaling: float, structure: CallStructure) -> Tensor | None:
        layout = layout_for(structure, query.device)
        if layout is None or not (fused or layout.rule <= FROM_FIRST):
            return None
        return packed_attention(query, key, value, layout, scaling)

    return attend
