"""Which blocks of keys a query row keeps: the smallest set that holds a share of the pooled attention.

Keys are averaged per block, counted from the first key of their sequence. A row scores the finished
blocks before its own with its own query, and the heads that share a key/value head pool their picks. A row's
choice is a function of its query and of keys at or before it: the same in prefill, in a chunk and in one
decode step, alone and in a batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .segments import Segment

if TYPE_CHECKING:
    from .request import AttentionRequest

BLOCK = 64
"""Keys per block where nothing else is said."""


def pooled_keys(key: Tensor, block: int = BLOCK) -> Tensor:
    """Returns the mean key of every block, `[…, ceil(kv_len / block), head_dim]` in fp32; the last may be partial."""
    kv_len = key.shape[-2]
    full = kv_len // block
    shape = (*key.shape[:-2], full, block, key.shape[-1])
    means: Tensor = key[..., : full * block, :].reshape(shape).float().mean(-2)
    if full * block == kv_len:
        return means
    return torch.cat([means, key[..., full * block :, :].float().mean(-2, keepdim=True)], dim=-2)


def keep_blocks(
    query: Tensor,
    pooled: Tensor,
    positions: Tensor,
    kv_len: int,
    *,
    mass: float,
    sinks: int,
    scaling: float,
    causal: bool,
    softcap: float | None = None,
    block: int = BLOCK,
) -> Tensor:
    """Returns the boolean `[num_kv_heads, rows, blocks]`: True where a row keeps a block.

    Args:
        query: `[num_kv_heads, group, rows, head_dim]`.
        pooled: `[num_kv_heads, blocks, head_dim]` of `pooled_keys`.
        positions: `[rows]`, index of each row among the keys of its sequence.
        kv_len: Keys of the sequence.
        mass: Share of the pooled attention to keep.
        sinks: The blocks of the first `sinks` keys are always kept.
        scaling: Factor on the scores.
        causal: Score finished blocks alone; otherwise all blocks.
        softcap: `c` of `c * tanh(score / c)`.
        block: Keys per block.
    """
    blocks = pooled.shape[-2]
    index = torch.arange(blocks, device=query.device)
    own = positions.div(block, rounding_mode="floor")[:, None]
    scores = torch.einsum("gnrd,gbd->gnrb", query.float(), pooled) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    forced = (index == own) | (index == own - 1) | (index * block < sinks)
    if causal:
        allowed = index <= own
        scores = scores.masked_fill(~(index < own), float("-inf"))
    else:
        allowed = torch.ones_like(forced)
        forced = forced | (index == own + 1)
        last = kv_len - (blocks - 1) * block
        scores = scores + torch.where(index == blocks - 1, math.log(last / block), 0.0)
    weights = torch.nan_to_num(torch.softmax(scores, dim=-1), nan=0.0)
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    picked = torch.zeros_like(weights, dtype=torch.bool).scatter_(-1, order, (before < mass) & (ordered > 0))
    return (picked.any(dim=1) | forced) & allowed


def keys_of_blocks(keep: Tensor, kv_len: int, block: int = BLOCK) -> Tensor:
    """Returns the boolean `[…, kv_len]` of keys that lie in kept blocks."""
    return keep.repeat_interleave(block, dim=-1)[..., :kv_len]


def block_segments(request: AttentionRequest) -> tuple[Segment, ...] | None:
    """Returns the segments in which blocks of keys are counted, None where blocks do not apply and all keys are kept.

    They apply to calls whose mask is made of segments (no dense mask, no holes in the padding), without a window and
    without an additive bias.
    """
    if request.structure.windowed or request.bias is not None:
        return None
    return request.structure.segments()


def picked_blocks(
    request: AttentionRequest,
    segment: Segment,
    mass: float,
    sinks: int,
    heads: Sequence[int] | slice = slice(None),
    block: int = BLOCK,
) -> Tensor:
    """Returns the boolean `[heads, segment.q_len, blocks]` of blocks that the rows of a segment keep.

    Args:
        request: The call.
        segment: One of its `block_segments`.
        mass: Share of the pooled attention that the kept blocks hold.
        sinks: The blocks of the first `sinks` keys are always kept.
        heads: Key/value heads.
        block: Keys per block.
    """
    query, key = request.query, request.key
    rows = slice(segment.q_start, segment.q_start + segment.q_len)
    keys = slice(segment.k_start, segment.k_start + segment.k_len)
    grouped = query[segment.row].view(key.shape[1], query.shape[1] // key.shape[1], *query.shape[2:])
    return keep_blocks(
        grouped[heads, :, rows],
        pooled_keys(key[segment.row, heads, keys], block),
        torch.arange(segment.q_len, device=query.device) + segment.offset,
        segment.k_len,
        mass=mass,
        sinks=sinks,
        scaling=request.scaling,
        causal=request.structure.causal,
        softcap=request.softcap,
        block=block,
    )


def kept_keys(
    request: AttentionRequest, mass: float, sinks: int, heads: Sequence[int], block: int = BLOCK
) -> Tensor | None:
    """Returns the boolean `[batch, heads, q_len, kv_len]` of keys in kept blocks, None where blocks do not apply.

    The arguments are those of `picked_blocks`.
    """
    segments = block_segments(request)
    if segments is None:
        return None
    shape = request.query.shape[0], len(heads), request.query.shape[2], request.key.shape[2]
    kept = torch.zeros(shape, dtype=torch.bool, device=request.query.device)
    for segment in segments:
        rows = slice(segment.q_start, segment.q_start + segment.q_len)
        keys = slice(segment.k_start, segment.k_start + segment.k_len)
        blocks = picked_blocks(request, segment, mass, sinks, heads, block)
        kept[segment.row, :, rows, keys] = keys_of_blocks(blocks, segment.k_len, block)
    return kept
