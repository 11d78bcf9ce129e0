"""The shortest ways: the operator for a structure, without a request around it."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from ...attention.request import CallSpec
from ...attention.structure import CallStructure
from ..base import FastCall
from . import limits
from .bands import constant
from .kernels import aligned, repeated, suits_efficient
from .varlen import layout_for, packed_attention

__all__ = ["bare_way"]


def bare_way(spec: CallSpec, structure: CallStructure) -> FastCall | None:
    """The operator itself where it says what the structure says, one masked call, or one call over packed runs."""
    if spec.kind in ("full", "causal", "suffix") and spec.head_dim == spec.head_dim_v:
        if spec.decode:
            # the operator's own CUDA kernels split the keys among programs and read grouped heads once
            stop = min(structure.kv_len, structure.offset() + 1) if structure.causal else structure.kv_len
            lone = spec.groups == 1 and spec.dtype == torch.float32
            if stop < 1 or not (spec.device == "cuda" or lone or stop <= limits.SHORT_KEYS):
                return None  # on processors the other single queries have ways of their own
            return _plain(False, spec.groups > 1, stop if stop < structure.kv_len else None)
        if spec.kind != "suffix":
            causal, grouped = spec.kind == "causal", spec.groups > 1
            if grouped and spec.device == "cuda" and spec.dtype == torch.float32:
                return _widened(causal)
            return _plain(causal, grouped)
    if spec.device != "cuda" or not suits_efficient(spec.dtype, spec.head_dim, spec.head_dim_v):
        return None
    if spec.kind == "small":
        return None if spec.needs_grad else _masked(structure)
    return _packed(structure, spec.needs_grad) if spec.kind in ("ragged", "suffix") else None


def _plain(causal: bool, grouped: bool, stop: int | None = None) -> FastCall:
    """One call without a mask; of the keys those before `stop`."""
    operator = F.scaled_dot_product_attention
    if grouped:
        operator = functools.partial(operator, enable_gqa=True)

    def attend(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        if stop is not None:
            key, value = key[:, :, :stop], value[:, :, :stop]
        return operator(query, key, value, None, 0.0, causal, scale=scaling).transpose(1, 2)

    return attend


def _widened(causal: bool) -> FastCall:
    """One call without a mask, with as many key/value heads as query heads, `[batch, heads, q_len, head_dim]`.

    The fused CUDA kernel of float32 takes no grouped heads. Left grouped, they go to unfused operations, which write
    the whole score matrix, and keep it for the backward: 2.25 GiB a layer for 9 heads and 8,192 tokens.
    """
    plain = _plain(causal, grouped=False)

    def attend(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        return plain(query, repeated(key, query), repeated(value, query), scaling)

    return attend


def _masked(structure: CallStructure) -> FastCall:
    """One call with a mask of numbers; torch makes one of a boolean mask in each layer."""

    def attend(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        key, value = repeated(key, query), repeated(value, query)
        mask = numbers(structure, query.dtype, query.device).expand(*query.shape[:3], -1)
        out: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, False, scale=scaling
        )[0]
        return out.transpose(1, 2)

    return attend


def numbers(structure: CallStructure, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The mask as numbers to add, `[batch or 1, heads or 1, q_len, kv_len]`; made once per forward pass."""
    key = ("numbers", dtype, device)
    if key not in structure._memo:
        shown = structure.visible(device=device)
        whole = torch.where(shown, constant(0.0, dtype, device), constant(float("-inf"), dtype, device))
        structure._memo[key] = aligned(whole)
    mask: Tensor = structure._memo[key]
    return mask


def _packed(structure: CallStructure, gradient: bool) -> FastCall | None:
    layout = layout_for(structure)
    if layout is None:
        return None

    def attend(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        return packed_attention(query, key, value, layout, scaling, gradient=gradient)

    return attend
