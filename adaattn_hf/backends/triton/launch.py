"""From a request to its launch: one query per sequence, many, or many with gradients."""

from __future__ import annotations

import torch

from ...attention.heads import head_windows
from ...attention.request import AttentionRequest, AttentionResult
from ..base import nothing_seen
from . import step
from .prefill import attend_forward
from .training import attend_with_gradients


def attend(request: AttentionRequest) -> AttentionResult:
    """Attention over the segments of a request; a structure that is not made of segments is refused."""
    if request.asks_nothing:
        return nothing_seen(request)
    tensors = (request.query, request.key, request.value, request.sink_logits)
    grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if request.query.shape[2] == 1 and not grad:
        return step.attend_step(request)
    windows = head_windows(request.structure, request.per_head, request.key.shape[1])
    if grad:
        return attend_with_gradients(request, windows)
    return attend_forward(request, windows)
