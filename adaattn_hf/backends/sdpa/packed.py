"""Real tokens as one packed row: runs of unequal length, and padding that has holes, without any mask.

The packed row is the batch itself where the runs cover it, else gathered. On CUDA, where every call costs tens of
microseconds whatever it computes, torch's flash and memory-efficient kernels walk it in one call; elsewhere each run is
a call.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...attention.structure import CallStructure, Segment
from ..capability import capability
from .kernels import dense_last, operator, repeated, suits_efficient, wants_gradient

# The memory-efficient kernel's names for what a run's queries see of its keys.
FULL, FROM_FIRST, TO_LAST = 0, 1, 2


class Layout(NamedTuple):
    """Where the runs lie in the packed rows.

    Attributes:
        rule: All keys, causal from the first key on, or causal so that the last query sees the last key.
        q_lengths, k_lengths: Queries and keys of the runs.
        borders: Where they begin and end, of queries and of keys, int32 `[2, runs + 1]`.
        queries, keys: int64 places `row * len + position` of the packed tokens; None where they are all tokens.
    """

    rule: int
    q_lengths: list[int]
    k_lengths: list[int]
    borders: Tensor
    queries: Tensor | None
    keys: Tensor | None


def layout_for(structure: CallStructure, device: torch.device) -> Layout | None:
    """The layout of a structure's runs, None where it is not made of such; found once per forward pass."""
    return structure.derived(_layout, device)


@torch.inference_mode(False)  # a later pass may keep the places for its gradients
def _layout(structure: CallStructure, device: torch.device) -> Layout | None:
    if structure.windowed:
        return None
    segments, keys = structure.segments(), None
    if segments is None:
        segments, keys = _without_holes(structure)
    elif segments:
        runs = [(s.row * structure.kv_len + s.k_start, s.k_len) for s in segments]
        keys = _places(runs, structure.batch * structure.kv_len)
    rule = _rule(structure, segments)
    if not segments or rule is None:
        return None
    runs = [(s.row * structure.q_len + s.q_start, s.q_len) for s in segments]
    queries = _places(runs, structure.batch * structure.q_len)
    lengths = [s.q_len for s in segments], [s.k_len for s in segments]
    sums = [[*itertools.accumulate(own, initial=0)] for own in lengths]
    borders = torch.tensor(sums, dtype=torch.int32, device=device)
    return Layout(rule, *lengths, borders, *(None if t is None else t.to(device) for t in (queries, keys)))


def _without_holes(structure: CallStructure) -> tuple[tuple[Segment, ...], Tensor | None]:
    """One run per batch row of padding with holes, and the places of its keys; none where order matters.

    A causal query that is padding stands between real ones, at no place among real keys.
    """
    real = structure.padding_on_host()
    if real is None or structure.causal or not structure.one_run_a_row:
        return (), None
    counts: list[int] = real.sum(1).tolist()
    segments = (Segment(row, 0, structure.q_len, 0, count, 0) for row, count in enumerate(counts) if count)
    return tuple(segments), real.flatten().nonzero().squeeze(1)


def _rule(structure: CallStructure, segments: Sequence[Segment]) -> int | None:
    if not structure.causal:
        return FULL
    if all(s.offset == 0 for s in segments):
        return FROM_FIRST
    if all(s.offset == s.k_len - s.q_len for s in segments):
        return TO_LAST
    return None


def _places(runs: Sequence[tuple[int, int]], total: int) -> Tensor | None:
    """Places of the tokens of runs `(start, length)`, None if these are all tokens in their order."""
    stop = 0
    for start, length in runs:
        if start != stop:
            return torch.cat([torch.arange(a, a + n, device="cpu") for a, n in runs])
        stop = start + length
    return None if stop == total else torch.arange(stop, device="cpu")


def packed_attention(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scaling: float) -> Tensor:
    """`[batch, q_len, heads, head_dim_v]`; queries outside of every run are zero.

    Args:
        query: `[batch, heads, q_len, head_dim]`.
        key: `[batch, num_kv_heads, kv_len, head_dim]`.
        value: `[batch, num_kv_heads, kv_len, head_dim_v]`.
        layout: The runs, on their device.
        scaling: Multiplies the scores.
    """
    batch, heads, q_len, _ = query.shape
    q, k, v = _packed(query, layout.queries), _packed(key, layout.keys), _packed(value, layout.keys)
    run = _one_by_one
    if walks_runs(query.device, query.dtype, query.shape[3], value.shape[3]):
        run = _flash if _suits_flash(q, v, layout) else _efficient
    out = run(q, k, v, layout, scaling)
    if layout.queries is not None:
        out = out.new_zeros((batch * q_len, *out.shape[1:])).index_copy_(0, layout.queries, out)
    return out.view(batch, q_len, heads, -1)


def walks_runs(device: torch.device | str, dtype: torch.dtype, *sizes: int) -> bool:
    """Whether torch has a kernel that walks packed rows there; nobody has run those of AMD's, which are CUDA, too."""
    return torch.device(device).type == "cuda" and torch.version.hip is None and suits_efficient(dtype, *sizes)


def _packed(t: Tensor, places: Tensor | None) -> Tensor:
    """`[tokens, heads, dim]` of `[batch, heads, len, dim]`."""
    tokens = t.transpose(1, 2).flatten(0, 1)
    return dense_last(tokens) if places is None else tokens.index_select(0, places)


def _one_by_one(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scaling: float) -> Tensor:
    """`[queries, heads, head_dim_v]` of packed tokens, a call for each run."""
    found = []
    parts = query.split(layout.q_lengths), key.split(layout.k_lengths), value.split(layout.k_lengths)
    for run in zip(*parts, strict=True):
        q, k, v = (t.transpose(0, 1)[None] for t in run)
        found.append(operator(q, k, v, scaling, causal=layout.rule != FULL)[0].transpose(0, 1))
    return torch.cat(found)


def _suits_flash(query: Tensor, value: Tensor, layout: Layout) -> bool:
    """Half precision on Ampere and later; the kernel aligns causality to the last key."""
    size = query.shape[2]
    return (
        query.dtype.itemsize == 2
        and value.shape[2] == size
        and size % 8 == 0
        and size <= 256
        and (layout.rule != FROM_FIRST or layout.q_lengths == layout.k_lengths)
        and _has_flash(query.device)
    )


@functools.cache
def _has_flash(device: torch.device) -> bool:
    facts = capability(device)
    return torch.backends.cuda.is_flash_attention_available() and facts is not None and facts.bf16


def _flash(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scaling: float) -> Tensor:
    """`[queries, heads, head_dim_v]` of packed tokens."""
    out: Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, *layout.borders, max(layout.q_lengths), max(layout.k_lengths),
        0.0, layout.rule != FULL, False, scale=scaling,
    )[0]  # fmt: skip
    return out


def _efficient(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scaling: float) -> Tensor:
    """`[queries, heads, head_dim_v]` of packed tokens."""
    key, value = repeated(key, query), repeated(value, query)
    out: Tensor = torch.ops.aten._efficient_attention_forward(
        query[None], key[None], value[None], None, *layout.borders, max(layout.q_lengths), max(layout.k_lengths),
        0.0, layout.rule, wants_gradient(query, key, value), scale=scaling,
    )[0]  # fmt: skip
    return out[0]
