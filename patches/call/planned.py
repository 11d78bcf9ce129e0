"""What a plan asks of a call: rules per head of an ordinary one, else all of it."""

from __future__ import annotations

from dataclasses import replace
from threading import get_ident
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from adaattn_hf.attention.request import AttentionRequest
from adaattn_hf.attention.structure import CallStructure
from adaattn_hf.plans.program import Program

from ..plans.bound import checked_layer
from ..plans.slots import layer_of

if TYPE_CHECKING:
    from adaattn_hf.attention.heads import HeadRules
    from adaattn_hf.attention.stored import StoredKV

    from .arguments import Call


def rules_of(
    module: nn.Module,
    program: Program,
    structure: CallStructure,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    stored: StoredKV | None,
) -> tuple[HeadRules | None] | None:
    """The rules per head by which a module's plan is one launch, `(None,)` where it is exact; None for the long way."""
    bound = None if module.training or program.owner is None else program.owner()
    if bound is None or get_ident() not in bound.threads:
        return None
    few, speaks = program.speaks_for(structure)
    if speaks is False and not isinstance(few, Tensor):
        return (None,)
    if (
        not speaks
        or isinstance(few, Tensor)
        or structure.mask is not None
        or len(program.plan.choices) != key.shape[1]
        or (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad))
    ):
        return None
    if stored is not None:
        program = program.over_stored
    asked = program.few if few else program.many
    if asked.apart or len(asked.heads) != len(program.plan.choices):
        return None
    return (asked.rules,)


def program_for(
    call: Call, request: AttentionRequest, config: object, compiling: bool
) -> tuple[Program | None, AttentionRequest]:
    """Returns what a module does about a call, None where it is exact, and the call as that needs it."""
    module, positions = call.module, call.kwargs.get("position_ids")
    program = layer_of(module) if compiling else checked_layer(module)
    dense = isinstance(call.attention_mask, Tensor) and call.sliding_window is not None
    if program is not None and dense and isinstance(positions, Tensor) and positions.dim() == 2:
        # a dense mask does not say how many tokens a cache dropped
        dropped = (positions[:, -1] - request.structure.kv_len + 1).clamp_min(0)
        request = replace(request, structure=request.structure.with_changes(dropped=dropped))
    if compiling:
        if program is not None and program.is_exact_for(request.query.shape[2]):
            program = None
        if program is not None and getattr(config, "attention_chunk_size", None):
            _refuse_chunks(module, program)
        if program is None and request.structure.mask is not None:
            # the padding beside the dense mask is for plans only
            request = replace(request, structure=request.structure.with_changes(key_padding=None))
    return program, request


def _refuse_chunks(module: nn.Module, program: Program) -> None:
    """Refuses choices that count keys from the first one, which a traced mask of chunks does not show (ValueError)."""
    if any(choice.keys is not None for choice in program.plan.choices):
        raise ValueError(
            f"plan of layer {program.plan.layer}: counts keys from a sequence's first, which a traced graph of "
            f"{type(module).__name__} does not tell from a chunk's; run the model without torch.compile, or remove the "
            "plan with adaattn_hf.remove_plan(model)"
        )
