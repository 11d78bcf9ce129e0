"""Rules per key/value head: one call of the library for each precision, without copies of adjoining heads."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...attention.heads import HeadRules, joined_heads, some_heads
from ...attention.request import AttentionRequest, AttentionResult
from ...attention.structure import CallStructure
from . import call
from .rules import Rules, rules_of, with_extras


class _Launch(NamedTuple):
    """Heads that one call of the library serves.

    Attributes:
        heads: Key/value heads.
        per_head: Their rules.
        rules: What the library is told, without extras.
        precision: Of the products.
    """

    heads: tuple[int, ...]
    per_head: HeadRules
    rules: Rules
    precision: str


def launch_names(rules: HeadRules) -> tuple[str, ...]:
    """Name of the call that serves each head: heads of one precision share one."""
    return tuple(f"{precision} products" for precision in rules.precisions)


def attend(request: AttentionRequest, rules: HeadRules) -> AttentionResult:
    """Attention of a request whose heads have rules of their own."""
    # one mask of each head is a part of the structure that a few heads must not share
    apart = request.structure.mask is not None and request.structure.mask.shape[1] > 1
    if apart:
        launches = _find_launches(request.structure, rules)
    else:
        launches = request.structure.cached(
            ("native heads", rules), lambda: _find_launches(request.structure, rules)
        )
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    for launch in launches:
        part = some_heads(request, launch.heads)
        told = launch.rules
        if apart:
            window, sinks = launch.per_head.window_in(request.structure, 0)
            told = replace(told, mask=part.structure.with_changes(window=window, sinks=sinks).visible())
        changes: dict[str, object] = {}
        if launch.precision == "int8" or request.query.dtype == torch.float32:
            changes["compute"] = launch.precision
        if part.stored is not None:
            changes.update(part.stored.rules())
        if changes:
            told = replace(told, **changes)  # type: ignore[arg-type]
        if part.bias is not None or part.sink_logits is not None or part.softcap is not None:
            told = with_extras(told, part.bias, part.sink_logits, part.softcap or 0.0, part.key.shape[2])
        out, lse = call.forward(
            part.query, part.key, part.value, part.scaling, told, need_lse=request.need_lse
        )
        assert out is not None  # the output is asked for
        outs.append(out)
        if lse is not None:
            lses.append(lse)
    order = [head for launch in launches for head in launch.heads]
    groups = request.query.shape[1] // request.key.shape[1]
    out = joined_heads(outs, order, groups, dim=2)
    return AttentionResult(out, joined_heads(lses, order, groups, dim=1) if request.need_lse else None)


def _find_launches(structure: CallStructure, rules: HeadRules) -> list[_Launch]:
    """The calls of the library for the rules of a layer."""
    cut = structure.k_segments is not None and structure.key_padding is not None
    # segments do not know where the sequence began that a chunk's border or padding cut short: a mask does
    told = rules_of(structure)
    dense = told.mask is not None or (rules.has_sinks and (structure.chunk is not None or cut))
    groups: dict[tuple[object, ...], list[int]] = {}
    for head, name in enumerate(launch_names(rules)):
        groups.setdefault((name, rules.window_in(structure, head) if dense else None), []).append(head)
    launches = []
    for heads in groups.values():
        part = rules.some(heads)
        if dense:
            window, sinks = rules.window_in(structure, heads[0])
            changed = (window, sinks) != (structure.window, structure.sinks)
            asked = rules_of(structure.with_changes(window=window, sinks=sinks)) if changed else told
        else:
            pairs = [rules.window_in(structure, head) for head in heads]
            asked = replace(
                told,
                head_windows=torch.tensor(
                    [-1 if window is None else window for window, _ in pairs],
                    dtype=torch.int64,
                    device="cpu",
                ),
                head_sinks=torch.tensor([sinks for _, sinks in pairs], dtype=torch.int64, device="cpu"),
            )
        if part.key_mean is not None and part.precision == "int8":
            asked = replace(asked, key_mean=part.key_mean.detach().float()[None].contiguous())
        launches.append(_Launch(tuple(heads), part, asked, part.precision))
    return launches
