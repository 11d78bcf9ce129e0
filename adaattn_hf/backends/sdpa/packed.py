"""Real tokens as one packed row: runs of unequal length, and padding that has holes, without any mask.

The packed row is the batch itself where the runs cover it, else gathered. On CUDA, where every call costs tens of
microseconds whatever it computes, torch's flash and memory-efficient kernels walk it in one call; elsewhere each run is
a call.
"""

import functools

import torch
from torch import Tensor

from ...attention.packing import FROM_FIRST, FULL, TO_LAST, Packed, pack, tokens_of
from ...attention.structure import MaskStructure, Segment
from ..capability import capability
from .kernels import operator, repeated, suits_efficient, suits_flash, wants_gradient


def layout_of(structure: MaskStructure, device: torch.device) -> Packed | None:
    """The layout of a structure's runs, None where it is not made of such; for `MaskStructure.cached`."""
    if structure.windowed:
        return None
    segments, keys = structure.segments(), None
    if segments is None:
        segments, keys = _without_holes(structure, device)
    if not structure.causal:
        rule = FULL
    elif all(s.offset == 0 for s in segments):
        rule = FROM_FIRST
    elif all(s.offset == s.k_len - s.q_len for s in segments):
        rule = TO_LAST
    else:
        return None
    return pack(structure, segments, rule, device, keys) if segments else None


@torch.inference_mode(False)  # as `pack`
def _without_holes(structure: MaskStructure, device: torch.device) -> tuple[tuple[Segment, ...], Tensor | None]:
    """One run per batch row of padding with holes, and the places of its keys; none where order matters.

    A causal query that is padding stands between real ones, at no place among real keys.
    """
    real = structure.padding_on_host()
    if real is None or structure.causal or not structure.one_run_a_row:
        return (), None
    counts: list[int] = real.sum(1).tolist()
    segments = (Segment(row, 0, structure.q_len, 0, count, 0) for row, count in enumerate(counts) if count)
    return tuple(segments), real.flatten().nonzero().squeeze(1).to(device)


def packed_attention(query: Tensor, key: Tensor, value: Tensor, layout: Packed, scaling: float) -> Tensor:
    """`[batch, q_len, heads, head_dim_v]` of `[batch, heads, length, …]`; queries outside of every run are zero."""
    batch, heads, q_len, _ = query.shape
    q, k, v = tokens_of(query, layout.queries), tokens_of(key, layout.keys), tokens_of(value, layout.keys)
    out: Tensor
    if not walks_runs(query.device, query.dtype, query.shape[3], value.shape[3]):
        parts = q.split(layout.q_lengths), k.split(layout.k_lengths), v.split(layout.k_lengths)
        runs = ([t.transpose(0, 1)[None] for t in run] for run in zip(*parts, strict=True))
        causal = layout.rule != FULL
        out = torch.cat([operator(a, b, c, scaling, causal=causal)[0].transpose(0, 1) for a, b, c in runs])
    elif _suits_flash(q, v, layout):
        out = torch.ops.aten._flash_attention_forward(
            q, k, v, layout.q_borders, layout.k_borders, layout.q_longest, layout.k_longest,
            0.0, layout.rule != FULL, False, scale=scaling,
        )[0]  # fmt: skip
    else:
        out = _efficient(q, k, v, layout, scaling)
    if layout.queries is not None:
        out = out.new_zeros((batch * q_len, *out.shape[1:])).index_copy_(0, layout.queries, out)
    return out.view(batch, q_len, heads, -1)


def walks_runs(device: torch.device | str, dtype: torch.dtype, *sizes: int) -> bool:
    """Whether torch has a kernel that walks packed rows there; nobody has run those of AMD's, which are CUDA, too."""
    return torch.device(device).type == "cuda" and torch.version.hip is None and suits_efficient(dtype, *sizes)


def _suits_flash(query: Tensor, value: Tensor, layout: Packed) -> bool:
    """On Ampere and later; the kernel aligns causality to the last key."""
    return (
        suits_flash(query.dtype, query.shape[2], value.shape[2])
        and (layout.rule != FROM_FIRST or layout.q_lengths == layout.k_lengths)
        and _has_flash(query.device)
    )


@functools.cache
def _has_flash(device: torch.device) -> bool:
    facts = capability(device)
    return torch.backends.cuda.is_flash_attention_available() and facts is not None and facts.bf16


def _efficient(query: Tensor, key: Tensor, value: Tensor, layout: Packed, scaling: float) -> Tensor:
    key, value = repeated(key, query), repeated(value, query)
    out: Tensor = torch.ops.aten._efficient_attention_forward(
        query[None], key[None], value[None], None, layout.q_borders, layout.k_borders,
        layout.q_longest, layout.k_longest, 0.0, layout.rule, wants_gradient(query, key, value), scale=scaling,
    )[0]  # fmt: skip
    return out[0]
