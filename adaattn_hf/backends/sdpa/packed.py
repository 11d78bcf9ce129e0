"""Real tokens as one packed row: runs of unequal length in one call of torch's kernels, and padding that has holes.

On CUDA every call costs tens of microseconds, forward and backward, whatever it computes: runs one by one are slower
than a dense mask until they are long. torch's flash and memory-efficient kernels walk a packed row instead, which is
the batch itself where the runs cover it, else gathered. Padding with holes, which is no runs, is gathered into some.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...attention.request import AttentionRequest, AttentionResult
from ...attention.structure import CallStructure, Segment
from ..capability import capability
from . import limits

# The memory-efficient kernel's names for what a run's queries see of its keys.
_FULL, _FROM_FIRST, _TO_LAST = 0, 1, 2


class Layout:
    """Where the runs lie in the packed rows.

    Attributes:
        rule: All keys, causal from the first key on, or causal so that the last query sees the last key.
        q_longest, k_longest: Lengths of the longest runs.
        square: Every run has as many keys as queries.
    """

    __slots__ = ("_host", "_placed", "k_longest", "q_longest", "rule", "square")

    def __init__(self, structure: CallStructure, segments: Sequence[Segment], rule: int) -> None:
        """The layout of segments that one rule describes."""
        self.rule = rule
        self.q_longest = max(s.q_len for s in segments)
        self.k_longest = max(s.k_len for s in segments)
        self.square = all(s.q_len == s.k_len for s in segments)
        borders = [
            [*itertools.accumulate((s.q_len for s in segments), initial=0)],
            [*itertools.accumulate((s.k_len for s in segments), initial=0)],
        ]
        queries = [(s.row * structure.q_len + s.q_start, s.q_len) for s in segments]
        keys = [(s.row * structure.kv_len + s.k_start, s.k_len) for s in segments]
        self._host: tuple[Tensor, Tensor | None, Tensor | None] = (
            torch.tensor(borders, dtype=torch.int32, device="cpu"),
            _places(queries, structure.batch * structure.q_len),
            _places(keys, structure.batch * structure.kv_len),
        )
        self._placed: dict[torch.device, Places] = {}

    @property
    def gathers(self) -> bool:
        """Whether the packed rows are others than those of the call."""
        return self._host[1] is not None or self._host[2] is not None

    def on(self, device: torch.device) -> Places:
        """The same as tensors on a device, moved there once."""
        if device not in self._placed:
            borders, *places = self._host
            q_borders, k_borders = borders.to(device).unbind(0)
            queries, keys = (None if t is None else t.to(device) for t in places)
            self._placed[device] = Places(q_borders, k_borders, queries, keys)
        return self._placed[device]


class Places(NamedTuple):
    """A layout's tensors.

    Attributes:
        q_borders, k_borders: int32 `[runs + 1]`.
        queries, keys: int64 places `row * len + position` of the packed tokens; None where they are all tokens.
    """

    q_borders: Tensor
    k_borders: Tensor
    queries: Tensor | None
    keys: Tensor | None


def layout_for(structure: CallStructure) -> Layout | None:
    """The layout of a structure's runs, where one call over them beats a call per run; found once per forward pass."""
    return structure.cached("layout", lambda: _layout(structure))


def _layout(structure: CallStructure) -> Layout | None:
    # nobody has run the kernels with borders on AMD's devices, which call themselves CUDA
    if structure.windowed or torch.version.hip is not None:
        return None
    segments = structure.segments()
    if not segments:
        return None
    rule = _rule(structure, segments)
    if rule is None:
        return None
    layout = Layout(structure, segments, rule)
    return None if layout.gathers and len(segments) <= limits.GATHERED_RUNS else layout


def _rule(structure: CallStructure, segments: Sequence[Segment]) -> int | None:
    if not structure.causal:
        return _FULL
    if all(s.offset == 0 for s in segments):
        return _FROM_FIRST
    if all(s.offset == s.k_len - s.q_len for s in segments):
        return _TO_LAST
    return None


def _places(runs: Sequence[tuple[int, int]], total: int) -> Tensor | None:
    """Places of the tokens of runs `(start, length)`, None if these are all tokens in their order."""
    stop = 0
    for start, length in runs:
        if start != stop:
            return torch.cat([torch.arange(a, a + n, device="cpu") for a, n in runs])
        stop = start + length
    return None if stop == total else torch.arange(stop, device="cpu")


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scaling: float, *, gradient: bool
) -> Tensor:
    """`[batch, q_len, heads, head_dim_v]`; queries outside of every run are zero.

    Args:
        query: `[batch, heads, q_len, head_dim]`.
        key: `[batch, num_kv_heads, kv_len, head_dim]`.
        value: `[batch, num_kv_heads, kv_len, head_dim_v]`.
        layout: The runs.
        scaling: Multiplies the scores.
        gradient: Keep what the backward pass needs.
    """
    batch, heads, q_len, _ = query.shape
    places = layout.on(query.device)
    q, k, v = _packed(query, places.queries), _packed(key, places.keys), _packed(value, places.keys)
    run = _flash if _suits_flash(q, v, layout) else _efficient
    out = run(q, k, v, layout, places, scaling, gradient)
    if places.queries is not None:
        whole = out.new_zeros((batch * q_len, *out.shape[1:]))
        out = (
            whole.index_copy(0, places.queries, out)
            if gradient
            else whole.index_copy_(0, places.queries, out)
        )
    return out.view(batch, q_len, heads, -1)


def _packed(t: Tensor, places: Tensor | None) -> Tensor:
    """`[tokens, heads, dim]` of `[batch, heads, len, dim]`."""
    tokens = t.transpose(1, 2).flatten(0, 1)
    if places is not None:
        return tokens.index_select(0, places)
    return tokens if tokens.stride(2) == 1 else tokens.contiguous()


def _suits_flash(query: Tensor, value: Tensor, layout: Layout) -> bool:
    """Half precision on Ampere and later; the kernel aligns causality to the last key."""
    size = query.shape[2]
    return (
        query.dtype.itemsize == 2
        and value.shape[2] == size
        and size % 8 == 0
        and size <= 256
        and (layout.rule != _FROM_FIRST or layout.square)
        and _has_flash(query.device)
    )


@functools.cache
def _has_flash(device: torch.device) -> bool:
    facts = capability(device)
    return torch.backends.cuda.is_flash_attention_available() and facts is not None and facts.bf16


def _flash(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, places: Places, scaling: float, gradient: bool
) -> Tensor:
    """`[queries, heads, head_dim_v]` of packed tokens."""
    out: Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, places.q_borders, places.k_borders, layout.q_longest, layout.k_longest,
        0.0, layout.rule != _FULL, False, scale=scaling,
    )[0]  # fmt: skip
    return out


def _efficient(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, places: Places, scaling: float, gradient: bool
) -> Tensor:
    """`[queries, heads, head_dim_v]` of packed tokens."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    out: Tensor = torch.ops.aten._efficient_attention_forward(
        query[None], key[None], value[None], None, places.q_borders, places.k_borders,
        layout.q_longest, layout.k_longest, 0.0, layout.rule, gradient, scale=scaling,
    )[0]  # fmt: skip
    return out[0]


class Gathered(NamedTuple):
    """All queries and the real keys as one packed row: its structure, and the places `row * len + position` of keys."""

    structure: CallStructure
    keys: Tensor


def compacted(structure: CallStructure) -> Gathered | None:
    """The packed form of a call whose padding has holes; None where there are none or where order matters.

    Made once per forward pass. A causal query that is padding stands between real ones, at no place among real keys.
    """
    if structure.key_padding is None or structure.windowed or structure.causal:
        return None
    if (
        structure.batch * structure.q_len * structure.kv_len <= limits.SMALL_PAIRS
        or not structure.one_run_a_row
        or structure.segments() is not None
    ):
        return None
    return structure.cached("compacted", lambda: _compacted(structure))


def _compacted(structure: CallStructure) -> Gathered:
    real = structure.padding_on_host()
    assert real is not None
    assert structure.key_padding is not None
    device, q_len = structure.key_padding.device, structure.q_len
    counts = real.sum(1).tolist()
    starts = itertools.accumulate(counts, initial=0)
    segments = tuple(
        Segment(0, row * q_len, q_len, start, count, 0)
        for row, (start, count) in enumerate(zip(starts, counts, strict=False))
        if count
    )
    rows = torch.arange(structure.batch, device="cpu")
    packed = CallStructure(
        1,
        structure.batch * q_len,
        sum(counts),
        q_segments=rows.repeat_interleave(q_len)[None].to(device),
        k_segments=rows.repeat_interleave(real.sum(1))[None].to(device),
    )
    packed.cached("segments", lambda: segments)
    return Gathered(packed, real.flatten().nonzero().squeeze(1).to(device))


def gathered_attention(
    gathered: Gathered,
    request: AttentionRequest,
    attend: Callable[[AttentionRequest, CallStructure], AttentionResult],
) -> AttentionResult:
    """Attention of the packed row, its queries in their rows again."""
    batch, heads, q_len, _ = request.query.shape
    one_row = request.with_tensors(
        _packed(request.query, None).transpose(0, 1)[None],
        _packed(request.key, gathered.keys).transpose(0, 1)[None],
        _packed(request.value, gathered.keys).transpose(0, 1)[None],
        gathered.structure,
    )
    out, lse = attend(one_row, gathered.structure)
    if lse is not None:
        lse = lse.reshape(heads, batch, q_len).transpose(0, 1)
    return AttentionResult(out.reshape(batch, q_len, heads, -1), lse)
