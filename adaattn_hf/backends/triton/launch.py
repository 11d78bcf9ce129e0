"""From a request to its launch: one query per sequence, many, or many with gradients."""

from __future__ import annotations

import torch

from ...attention.request import AttentionRequest, AttentionResult
from ..base import nothing_seen
from ..windows import head_windows
from .blocks import attend_blocks
from .prefill import attend_forward
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
    rules = request.per_head
    blocks = rules is not None and rules.kept_block > 0 and not request.structure.windowed
    if request.query.shape[2] == 1 and not grad and not blocks:
        return attend_step(request)
    segments = request.structure.segments()
    if segments is None:
        raise ValueError("structure: a dense mask or padding with holes, expected runs; use the sdpa backend")
    windows = head_windows(request.structure, request.per_head, request.key.shape[1])
    if rules is not None and blocks:
        return attend_blocks(request, rules, segments, windows)
    return (attend_with_gradients if grad else attend_forward)(request, segments, windows)
