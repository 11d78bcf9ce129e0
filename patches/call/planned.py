"""Which rules per head a layer's plan asks of an ordinary call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from adaattn_hf.attention.structure import CallStructure
from adaattn_hf.plans.choices import PRECISE_ROWS
from adaattn_hf.plans.fit import resolved

if TYPE_CHECKING:
    from adaattn_hf.attention.heads import HeadRules
    from adaattn_hf.attention.stored import StoredKV


def rules_of(
    module: nn.Module,
    raw: Any,
    structure: CallStructure,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    stored: StoredKV | None,
) -> tuple[HeadRules | None] | None:
    """The rules per head by which a module's plan is one launch, `(None,)` where it is exact; None for the long way."""
    known = None if module.training else resolved(module.__dict__, raw)
    if known is None:
        return None
    program, few = known.program, query.shape[2] < PRECISE_ROWS
    if program is None or (program.exact_steps and few):
        return (None,)
    limit = program.max_length
    if structure.kv_len > limit and structure.causal and structure.plain and structure.offset() >= limit:
        return (None,)  # all rows stand beyond what the plan speaks for
    if (
        structure.kv_len > limit
        or structure.mask is not None
        or len(program.plan.choices) != key.shape[1]
        or (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad))
    ):
        return None
    if stored is not None:
        program = program.over_stored
    asked = program.of_few if few else program.of_many
    if asked.apart or len(asked.heads) != len(program.plan.choices):
        return None
    return (asked.rules,)
