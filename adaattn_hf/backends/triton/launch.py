"""From a request to its launch: one query per sequence, many, or many with gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...attention.heads import head_windows
from ...attention.request import AttentionRequest, AttentionResult, CallSpec
from ...attention.stored import BITS
from ..base import Launch, nothing_seen
from . import step
from .prefill import attend_forward, run
from .training import attend_with_gradients

if TYPE_CHECKING:
    from ...attention.heads import HeadRules
    from ...attention.stored import StoredKV
    from ...attention.structure import CallStructure


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


def prepare(rules: HeadRules | None) -> Launch:
    """The launch of many queries without gradients, for calls that ask for nothing but rules per head."""

    def launch(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        structure: CallStructure,
        stored: StoredKV | None = None,
    ) -> Tensor:
        return run(query, key, value, structure, scaling, head_windows(structure, rules, key.shape[1])).out

    return launch


def prepare_step(spec: CallSpec, rules: HeadRules | None) -> Launch:
    """The launch of one query per sequence, for calls that ask for nothing but rules per head."""
    bits = 0 if spec.stored is None else BITS[spec.stored]
    device = torch.device(spec.device) if spec.device_index is None else torch.device("cuda", spec.device_index)
    known = step.sized(spec.groups, spec.head_dim, spec.head_dim_v, spec.dtype, bits, device)

    def launch(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        structure: CallStructure,
        stored: StoredKV | None = None,
    ) -> Tensor:
        if stored is not None:
            stored.check_device(query.device)
        windows = head_windows(structure, rules, key.shape[1])
        return step.launch(known, step.Step(query, key, value, structure, scaling, windows, stored)).out

    return launch
