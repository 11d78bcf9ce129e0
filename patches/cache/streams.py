"""Attention over a layer whose heads keep different tokens: one request per group of heads that keep the same."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor, nn

from adaattn_hf.attention.legible import legible
from adaattn_hf.attention.listeners import ask, listeners, show
from adaattn_hf.attention.request import AttentionRequest
from adaattn_hf.attention.slicing import joined_heads
from adaattn_hf.attention.structure import CallStructure
from adaattn_hf.config import settings_in
from adaattn_hf.plans import execute
from adaattn_hf.plans.program import Program

from ..plans.bound import checked_layer
from .groups import some_heads, starts_of, structure_of

if TYPE_CHECKING:
    from .streaming import StreamingLayer


def attend_streams(
    module: nn.Module, request: AttentionRequest, layer: StreamingLayer, forced: str | None, wanted: bool
) -> Tensor:
    """Returns what the layer's plan computes over a full cache, `[batch, q_len, heads, head_dim_v]`.

    ValueError: the plan is gone or another, speaks for shorter sequences, or the call needs keys that are gone.
    """
    query = request.query
    if layer.fresh is None:
        raise RuntimeError(
            f"cache: nothing new for {type(module).__name__} to attend to; layers that read the keys of others are not "
            "served, use a cache with streaming=False"
        )
    fresh = tuple(tensor.to(query.dtype) for tensor in layer.fresh)
    past = layer.count - query.shape[2]
    try:
        _nobody_looks(module, wanted)
        program = _checked(module, layer)
        masked = request.structure.mask is not None or request.bias is not None
        structure = _served(legible(request) if masked else request, program)
        read = layer.read(starts_of(structure), query)
    except ValueError:
        layer.withdraw()
        raise
    if not past:
        whole = replace(request, key=fresh[0], value=fresh[1], structure=structure, bias=None)
        return _answer(module, program, whole, forced)
    groups = query.shape[1] // request.key.shape[1]
    outs: list[Tensor] = []
    order: list[int] = []
    for group, (key, value, record) in read:
        members = [head * groups + member for head in group.heads for member in range(groups)]
        part = AttentionRequest(
            some_heads(query, members),
            key if record is not None else key.to(query.dtype),
            value if record is not None else value.to(query.dtype),
            structure if group.span is None else structure_of(structure, group.span),
            request.scaling,
            request.dropout,
            request.softcap,
            None if request.sink_logits is None else request.sink_logits[members],
            stored=record,
        )
        own = program.of_heads(group.heads, all_keys=group.span is not None)
        outs.append(_answer(module, own, part, forced))
        order += group.heads
    return joined_heads(outs, order, groups, dim=2)


def _answer(module: nn.Module, program: Program, request: AttentionRequest, forced: str | None) -> Tensor:
    heard_by, request.layer, request.backend = listeners(), program.plan.layer, forced
    out = ask(heard_by, module, request)
    if out is None:
        out = execute.attend(program, request, forced).out
    show(heard_by, module, request, out)
    return out


def _nobody_looks(module: nn.Module, wanted: bool) -> None:
    settings = settings_in(getattr(module, "config", None))
    asked = {
        "output_attentions": wanted,
        **dict.fromkeys((listener.whole for listener in listeners() if listener.whole), True),
        "adaattn.monitor": settings.monitor,
        "adaattn.shadow": settings.shadow > 0,
    }
    if any(asked.values()):
        raise ValueError(
            f"cache: {', '.join(name for name, holds in asked.items() if holds)} asks for all keys, which streaming "
            "heads do not keep; use a cache with streaming=False"
        )


def _checked(module: nn.Module, layer: StreamingLayer) -> Program:
    program = checked_layer(module)
    if program is not None and program.handle == layer.program:
        return program
    if program is None or not layer.fits(program.plan):
        raise ValueError(
            f"cache: its heads keep the windows of a plan, and {type(module).__name__} "
            f"{'has none' if program is None else 'has another one'} now; make the cache after the plan is loaded"
        )
    layer.program = program.handle
    return program


def _served(request: AttentionRequest | None, program: Program) -> CallStructure:
    where = f"cache: layer {program.plan.layer} has streaming heads, which keep no keys beyond their windows"
    structure = None if request is None else request.structure
    if (
        structure is None
        or request is None
        or request.bias is not None
        or structure.mask is not None
        or structure.spans is not None
        or structure.chunk is not None
        or structure.k_segments is not None
        or structure.window is not None
        or (structure.q_len > 1 and not structure.causal)
        or (structure.causal and structure.offset() != structure.kv_len - structure.q_len)
    ):
        raise ValueError(
            f"{where}, and serve causal sequences with padding alone, not documents, chunks, a bias, a preallocated "
            "cache or a dense mask without rules; use a cache with streaming=False"
        )
    within = execute.rows_within(structure, program.max_length, request.query.device)
    if within is not True and not (within is not False and bool(within.all())):
        raise ValueError(
            f"{where}, and the plan speaks for sequences of up to {program.max_length} tokens, got {structure.kv_len}: "
            "later rows are exact and read every key. Use a cache with streaming=False, or calibrate for longer "
            "sequences (--lengths)"
        )
    return structure
