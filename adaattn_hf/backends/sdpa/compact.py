"""Padding with holes: the real tokens, in their order, as one packed row."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...attention.request import AttentionRequest, AttentionResult
from ...attention.structure import CallStructure, Segment
from . import limits

__all__ = ["Gathered", "compacted", "scattered"]


class Gathered(NamedTuple):
    """The packed structure, and the places `row * len + position` of its queries and keys in the call."""

    structure: CallStructure
    queries: Tensor
    keys: Tensor


def compacted(structure: CallStructure) -> Gathered | None:
    """The packed form, where leaving the hidden keys out keeps the order that causality needs; else None.

    Made once per forward pass.
    """
    if structure.key_padding is None or structure.windowed:
        return None
    if (
        structure.batch * structure.q_len * structure.kv_len <= limits.SMALL_PAIRS
        or structure.segments() is not None
    ):
        return None
    if structure.chunk is not None or structure.k_segments is not None or structure.spans is not None:
        return None
    if structure.mask is not None or (structure.causal and not structure.pads_queries):
        return None
    if structure.causal and (structure.offset() != 0 or structure.q_len != structure.kv_len):
        return None
    if "compacted" not in structure._memo:
        structure._memo["compacted"] = _compacted(structure)
    found: Gathered = structure._memo["compacted"]
    return found


def _compacted(structure: CallStructure) -> Gathered:
    real = structure.padding_on_host()
    assert real is not None
    assert structure.key_padding is not None
    offset = structure.offset()
    places = torch.arange(structure.q_len) + offset
    shown = torch.ones(structure.batch, structure.q_len, dtype=torch.bool)
    if structure.pads_queries:
        # the definition reads the padding of a query outside the keys at the nearest key
        shown = real[:, places.clamp(0, structure.kv_len - 1)]
    rows = torch.arange(structure.batch)
    segments = []
    q_start = k_start = 0
    for row in range(structure.batch):
        q_len, k_len = int(shown[row].sum()), int(real[row].sum())
        if q_len and k_len:
            segments.append(Segment(0, q_start, q_len, k_start, k_len, 0))
        q_start, k_start = q_start + q_len, k_start + k_len
    device = structure.key_padding.device
    packed = CallStructure(
        1,
        q_start,
        k_start,
        causal=structure.causal,
        q_segments=rows.repeat_interleave(shown.sum(1))[None].to(device),
        k_segments=rows.repeat_interleave(real.sum(1))[None].to(device),
    )
    packed._memo["segments"] = tuple(segments)
    return Gathered(
        packed,
        shown.flatten().nonzero().squeeze(1).to(device),
        real.flatten().nonzero().squeeze(1).to(device),
    )


def scattered(
    gathered: Gathered,
    request: AttentionRequest,
    attend: Callable[[AttentionRequest, CallStructure], AttentionResult],
) -> AttentionResult:
    """Attention of the packed row, put back in its places."""
    batch, heads, q_len, _ = request.query.shape
    small = request.with_tensors(
        _packed(request.query, gathered.queries),
        _packed(request.key, gathered.keys),
        _packed(request.value, gathered.keys),
        gathered.structure,
    )
    result = attend(small, gathered.structure)
    out = result.out.new_zeros((batch * q_len, heads, result.out.shape[3]))
    out = out.index_copy(0, gathered.queries, result.out[0]).view(batch, q_len, heads, -1)
    if result.lse is None:
        return AttentionResult(out)
    lse = result.lse.new_full((batch * q_len, heads), float("-inf"))
    if request.sink_logits is not None:
        lse = lse.copy_(request.sink_logits.detach().expand_as(lse))
    lse = lse.index_copy(0, gathered.queries, result.lse[0].transpose(0, 1))
    return AttentionResult(out, lse.view(batch, q_len, heads).transpose(1, 2))


def _packed(t: Tensor, places: Tensor) -> Tensor:
    """`[1, heads, len(places), dim]` of `[batch, heads, len, dim]`."""
    by_place = t.transpose(1, 2).flatten(0, 1)
    return by_place.index_select(0, places).transpose(0, 1)[None]
