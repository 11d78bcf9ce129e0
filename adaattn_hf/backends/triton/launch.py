"""From a request to its launch: one query per sequence, many, or many with gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...attention.request import AttentionRequest, AttentionResult
from ..base import Launch, by_requests, nothing_seen
from ..windows import head_windows
from .prefill import Prefill, attend_forward, prefill_of
from .step import attend_step
from .training import attend_with_gradients

if TYPE_CHECKING:
    from ...attention.heads import HeadRules
    from ...attention.stored import StoredKV
    from ...attention.structure import CallStructure


def attend(request: AttentionRequest) -> AttentionResult:
    """Attention over the segments of a request.

    Raises:
        ValueError: The structure is not made of segments.
    """
    if request.asks_nothing:
        return nothing_seen(request)
    tensors = (request.query, request.key, request.value, request.sink_logits)
    grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if request.query.shape[2] == 1 and not grad:
        return attend_step(request)
    segments = request.structure.segments()
    if segments is None:
        raise ValueError("structure: a dense mask or padding with holes, expected runs; use the sdpa backend")
    windows = head_windows(request.structure, request.per_head, request.key.shape[1])
    return (attend_with_gradients if grad else attend_forward)(request, segments, windows)


def prepare(rules: HeadRules | None) -> Launch:
    """Of many queries without gradients: one launch, put together once for a structure."""
    closely = by_requests(attend, rules)

    def launch(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        structure: CallStructure,
        stored: StoredKV | None = None,
    ) -> Tensor:
        place = _prefill, rules, query.shape, key.shape, value.shape, query.dtype, query.device
        found = structure.cached(
            place,
            lambda: _prefill(AttentionRequest(query, key, value, structure, scaling, per_head=rules)),
        )
        if found is not None:
            return found(structure, query, key, value, scaling)
        return closely(query, key, value, scaling, structure)

    return launch


def _prefill(request: AttentionRequest) -> Prefill | None:
    """What calls like a request launch; None where they ask nothing, or see no runs."""
    segments = None if request.asks_nothing else request.structure.segments()
    if segments is None:
        return None
    windows = head_windows(request.structure, request.per_head, request.key.shape[1])
    return prefill_of(request, segments, windows, need_lse=False)
