"""What each choice means, as a change of the request: the definition that the execution is tested against.

`defined` turns a request into another one whose exact attention is the approximated function. It may build a
dense mask and serves tests, `output_attentions` and calibration; `execute` computes the same with less work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from adaattn_hf.plan import BLOCK, Choice, LayerPlan
from adaattn_hf.request import AttentionRequest
from adaattn_hf.selection import keep_blocks, keys_of_blocks, pooled_keys
from adaattn_hf.stats.noise import through_dtype, through_int8
from adaattn_hf.structure import CallStructure, Segment

PRECISE_ROWS = 16
"""Fewer query rows than this are computed in the model's precision: a decode step reads the cache once, and rounding it
anew would cost more than it saves. It is never less exact."""


@dataclass(frozen=True, eq=False)
class LayerTensors:
    """Calibrated tensors of one layer.

    Attributes:
        key_mean: `[num_kv_heads, head_dim]`, subtracted from keys before int8 rounding; zeros when absent.
        query_basis: Per key/value head `[head_dim, rank]`; see `stats.spectrum.score_factors`.
        key_basis: Per key/value head `[head_dim, rank]`.
        folded: Whether the model's weights project onto the bases already: a rank is then its first columns.
    """

    key_mean: Tensor | None = None
    query_basis: Mapping[int, Tensor] = field(default_factory=dict)
    key_basis: Mapping[int, Tensor] = field(default_factory=dict)
    folded: bool = False


@dataclass(frozen=True, eq=False)
class Program:
    """A layer's plan with its tensors, ready to run.

    Attributes:
        plan: The choices.
        tensors: Bases and means.
        max_length: Rows at this position of their sequence or later are exact; bidirectional, all rows of a
            longer sequence.
    """

    plan: LayerPlan
    tensors: LayerTensors
    max_length: int


def heads_of(request: AttentionRequest, kv_heads: list[int]) -> AttentionRequest:
    """Returns the request of a few key/value heads and the query heads that share them; views where they adjoin."""
    total, groups = request.key.shape[1], request.query.shape[1] // request.key.shape[1]
    if kv_heads == list(range(total)):
        return request
    heads = [head * groups + member for head in kv_heads for member in range(groups)]

    def rows(tensor: Tensor, dim: int, index: list[int]) -> Tensor:
        if index == list(range(index[0], index[0] + len(index))):
            return tensor.narrow(dim, index[0], len(index))
        return tensor.index_select(dim, torch.tensor(index, device=tensor.device))

    structure = request.structure
    if structure.mask is not None and structure.mask.shape[1] > 1:
        structure = structure.with_changes(mask=rows(structure.mask, 1, heads))
    bias = request.bias
    return replace(
        request,
        query=rows(request.query, 1, heads),
        key=rows(request.key, 1, kv_heads),
        value=rows(request.value, 1, kv_heads),
        structure=structure,
        sink_logits=None if request.sink_logits is None else rows(request.sink_logits, 0, heads),
        bias=bias if bias is None or bias.shape[1] == 1 else rows(bias, 1, heads),
    )


def windowed(structure: CallStructure, choice: Choice) -> CallStructure:
    """Returns the structure with the choice's window, never wider than the model's own.

    A layer that has a window of its own drops far keys already: there the choice may shorten it, and adds no
    sinks.
    """
    if structure.window is None:
        return structure.with_changes(window=choice.window, sinks=choice.sinks)
    if choice.window >= structure.window:
        return structure
    return structure.with_changes(window=choice.window)


def rows_with_fewer_keys(choice: Choice, first: int, stop: int, kv_len: int, causal: bool) -> int:
    """Returns how many rows at positions from `first` to `stop` see fewer keys than exact attention.

    Of blocks: how many may, since the sinks' block and those beside a row's own are always kept.

    Args:
        choice: The choice.
        first: Position of the first row.
        stop: Position behind the last one.
        kv_len: Keys of the sequence.
        causal: Whether attention is causal.
    """
    if choice.kind == "exact":
        return 0
    if causal:
        beyond = choice.window + choice.sinks if choice.kind == "window" else 3 * BLOCK + choice.sinks
        return max(stop - max(first, beyond), 0)
    if choice.kind == "window":
        # keys are lost on the left beyond the sinks, and on the right up to the end
        left = max(stop - max(first, choice.window + choice.sinks), 0)
        right = max(min(stop, kv_len - choice.window) - first, 0)
        both = max(min(stop, kv_len - choice.window) - max(first, choice.window + choice.sinks), 0)
        return left + right - both
    blocks = -(-kv_len // BLOCK)
    sinks = -(-choice.sinks // BLOCK)

    def may_lose(row: int) -> bool:
        own = row // BLOCK
        return len({*range(max(own - 1, 0), min(own + 2, blocks)), *range(min(sinks, blocks))}) < blocks

    return sum(may_lose(row) for row in range(first, stop))


def rounded(
    request: AttentionRequest, choice: Choice, kv_heads: list[int], tensors: LayerTensors
) -> AttentionRequest:
    """Returns the request with queries, keys and values rounded as the choice says, in their own dtype."""
    query, key, value = request.query, request.key, request.value
    if choice.precision == "model" or query.shape[2] < PRECISE_ROWS:
        return request
    if choice.precision == "bf16":
        return replace(
            request,
            query=through_dtype(query, torch.bfloat16),
            key=through_dtype(key, torch.bfloat16),
            value=through_dtype(value, torch.bfloat16),
        )
    if tensors.key_mean is None:
        smooth = through_int8(key)
    else:
        mean = tensors.key_mean[kv_heads].to(key)[None, :, None]
        # Adding the mean back keeps softcapped scores and learned sinks right, which a shift of all scores
        # would move.
        smooth = through_int8(key - mean) + mean
    return replace(request, query=through_int8(query), key=smooth, value=through_int8(value))


def ranked(
    request: AttentionRequest, choice: Choice, kv_heads: list[int], tensors: LayerTensors
) -> AttentionRequest:
    """Returns the request with queries and keys in the `rank` columns that keep most of the scores.

    One query, or a few, is folded back to the head's width instead: the same scores without touching the
    cached keys.
    """
    if not choice.rank:
        return request
    query, key = request.query, request.key
    if tensors.folded:
        return replace(request, query=query[..., : choice.rank], key=key[..., : choice.rank])
    groups = query.shape[1] // key.shape[1]
    query_basis = torch.stack([tensors.query_basis[head][:, : choice.rank] for head in kv_heads]).to(query)
    key_basis = torch.stack([tensors.key_basis[head][:, : choice.rank] for head in kv_heads]).to(query)
    if query.shape[2] < PRECISE_ROWS:
        fold = (query_basis @ key_basis.mT).repeat_interleave(groups, dim=0)
        return replace(request, query=query @ fold)
    return replace(request, query=query @ query_basis.repeat_interleave(groups, dim=0), key=key @ key_basis)


def blocks_apply(request: AttentionRequest) -> tuple[Segment, ...] | None:
    """Returns the runs in which blocks of keys are counted, None where blocks do not apply and all keys are kept."""
    if request.structure.windowed or request.bias is not None:
        return None
    return request.structure.segments()


def picked_blocks(
    request: AttentionRequest, run: Segment, choice: Choice, heads: Sequence[int] | slice = slice(None)
) -> Tensor:
    """Returns the boolean `[heads, run.q_len, blocks]` of blocks that the rows of a run keep.

    Args:
        request: The call.
        run: One of its runs.
        choice: Says how much mass the kept blocks hold.
        heads: Key/value heads.
    """
    query, key = request.query, request.key
    rows = slice(run.q_start, run.q_start + run.q_len)
    keys = slice(run.k_start, run.k_start + run.k_len)
    grouped = query[run.row].view(key.shape[1], query.shape[1] // key.shape[1], *query.shape[2:])
    return keep_blocks(
        grouped[heads, :, rows],
        pooled_keys(key[run.row, heads, keys]),
        torch.arange(run.q_len, device=query.device) + run.offset,
        run.k_len,
        mass=choice.mass,
        sinks=choice.sinks,
        scaling=request.scaling,
        causal=request.structure.causal,
        softcap=request.softcap,
    )


def block_mask(request: AttentionRequest, choice: Choice) -> Tensor | None:
    """Returns the boolean `[batch, heads, q_len, kv_len]` of keys in kept blocks, `None` where blocks do not apply.

    Blocks are counted from the first key of each sequence, so they need a structure made of runs without a
    window.
    """
    runs = blocks_apply(request)
    if runs is None:
        return None
    query, key = request.query, request.key
    batch, heads, q_len, _ = query.shape
    kv_heads, kv_len = key.shape[1], key.shape[2]
    kept = torch.zeros(batch, kv_heads, q_len, kv_len, dtype=torch.bool, device=query.device)
    for run in runs:
        rows = slice(run.q_start, run.q_start + run.q_len)
        keys = slice(run.k_start, run.k_start + run.k_len)
        kept[run.row, :, rows, keys] = keys_of_blocks(picked_blocks(request, run, choice), run.k_len)
    return kept.repeat_interleave(heads // kv_heads, dim=1)


def defined(
    request: AttentionRequest, choice: Choice, kv_heads: list[int], tensors: LayerTensors
) -> AttentionRequest:
    """Returns the request whose exact attention is what the choice computes for these key/value heads.

    Args:
        request: The request of these heads alone; see `heads_of`.
        choice: The choice they share.
        kv_heads: Their indices in the layer, for `tensors`.
        tensors: Bases and means of the layer.
    """
    changed = rounded(
        ranked(request, choice, kv_heads, tensors),
        choice,
        kv_heads,
        LayerTensors() if choice.rank else tensors,
    )
    if choice.kind == "window":
        return replace(changed, structure=windowed(request.structure, choice))
    if choice.kind == "blocks":
        mask = block_mask(request, choice)
        if mask is not None:
            own = request.structure.mask
            return replace(
                changed, structure=request.structure.with_changes(mask=mask if own is None else mask & own)
            )
    return changed
