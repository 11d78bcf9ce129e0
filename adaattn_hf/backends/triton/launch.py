"""From a request to its launch: one query per sequence, many, or many with gradients."""

from __future__ import annotations

import torch

from ...attention.request import AttentionRequest, AttentionResult, CallSpec
from ..base import FastCall, nothing_seen
from ..windows import head_windows
from .prefill import attend_forward, prefill_of
from .step import attend_step
from .training import attend_with_gradients


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


def fast_call(spec: CallSpec, request: AttentionRequest) -> FastCall | None:
    """The launch of many queries without gradients; steps differ in more than their tensors."""
    if spec.decode or spec.needs_grad or request.asks_nothing:
        return None
    segments = request.structure.segments()
    if segments is None:
        return None
    windows = head_windows(request.structure, request.per_head, request.key.shape[1])
    return prefill_of(request, segments, windows, need_lse=False)
