"""What a plan asks of a call: rules per head of an ordinary one, else all of it, watched where settings say so."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from adaattn_hf.attention.request import AttentionRequest
from adaattn_hf.attention.structure import CallStructure
from adaattn_hf.attention.tap import Tap, listening
from adaattn_hf.backends.eager import attention_weights
from adaattn_hf.backends.select import attend
from adaattn_hf.config import settings_in
from adaattn_hf.plans import execute
from adaattn_hf.plans.choices import PRECISE_ROWS
from adaattn_hf.plans.program import Program

from ..observe import shadow
from ..observe.monitoring import watched
from ..plans.attach import program_of
from ..plans.fit import resolved

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
    within = structure.kv_len <= limit
    if not within and structure.causal and (places := structure.places) is not None:
        if places[0] >= limit:
            return (None,)  # all rows stand beyond what the plan speaks for
        within = places[1] <= limit
    if (
        not within
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


def by_plan(
    module: nn.Module,
    request: AttentionRequest,
    forced: str | None,
    config: Any,
    tap: Tap | None,
    wanted: bool,
    window: int | None,
) -> tuple[Tensor, Tensor | None]:
    """Returns the output of a layer whose model has settings, by its plan if it has one, and weights if `wanted`."""
    compiling = torch.compiler.is_compiling()
    program = program_of(module, compiling)
    if compiling and program is not None and program.is_exact_for(request.query.shape[2]):
        program = None
    if compiling and program is None and request.structure.mask is not None:
        # the padding beside the dense mask is for plans only
        request = replace(request, structure=request.structure.with_changes(key_padding=None))
    if tap is not None:
        out = tap(module, request.widened())
    elif program is None:
        out = attend(request, forced).out
    else:
        if compiling and getattr(config, "attention_chunk_size", None):
            _refuse_chunks(module, program)
        if not compiling and settings_in(config).monitor and listening().seats is None:
            program = watched(module, program, request.widened())
        out = execute.attend(program, request, forced, window).out
    if not compiling and tap is None and (limit := settings_in(config).shadow):
        shadow.compare(
            module, request, forced, program, out, limit=limit, action=settings_in(config).mismatch
        )
    if not wanted:
        return out, None
    return out, attention_weights(request) if program is None else execute.weights(program, request)


def _refuse_chunks(module: nn.Module, program: Program) -> None:
    """Refuses choices that count keys from the first one, which a traced mask of chunks does not show.

    Raises:
        ValueError: The plan has such a choice.
    """
    if any(choice.keys is not None for choice in program.plan.choices):
        raise ValueError(
            f"plan of layer {program.plan.layer}: counts keys from a sequence's first, which a traced graph of "
            f"{type(module).__name__} does not tell from a chunk's; run the model without torch.compile, or remove the "
            "plan with adaattn_hf.remove_plan(model)"
        )
