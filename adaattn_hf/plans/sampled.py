"""Measures a plan on a few rows of a call: the attention mass that it drops, and the change by its operands."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..attention.heads import some_heads, some_rows
from ..attention.request import AttentionRequest
from ..attention.segments import Segment
from ..attention.structure import CallStructure
from ..backends import select
from . import execute
from .choices import PRECISE_ROWS, Choice
from .program import Program


def one_run(request: AttentionRequest, turn: int) -> AttentionRequest | None:
    """Returns one segment of a call as a request of its own, chosen by turn; None if the mask has no segments.

    Of a padded call without the queries that are padding themselves: those beside the segment's keys.
    """
    structure = request.structure
    segments = None if structure.sinks and not structure.sinks_at_runs else structure.segments()
    if not segments:
        return None
    run: Segment = segments[turn % len(segments)]
    if structure.key_padding is not None:
        before, stop = max(0, -run.offset), min(run.q_len, run.k_len - run.offset)
        if before >= stop:
            return None
        run = run._replace(q_start=run.q_start + before, q_len=stop - before, offset=run.offset + before)
    queries, keys = slice(run.q_start, run.q_start + run.q_len), slice(run.k_start, run.k_start + run.k_len)
    row, bias = slice(run.row, run.row + 1), request.bias
    if bias is not None:
        bias = bias if bias.shape[0] == 1 else bias[row]
        bias = bias if bias.shape[2] == 1 else bias[:, :, queries]
        bias = bias if bias.shape[3] == 1 else bias[..., keys]
    plain = CallStructure(
        1, run.q_len, run.k_len, structure.causal, run.offset, structure.window, structure.sinks
    )
    return replace(
        request,
        query=request.query[row, :, queries],
        key=request.key[row, :, keys],
        value=request.value[row, :, keys],
        structure=plain,
        bias=bias,
    )


@torch.no_grad()
def relative_change(program: Program, request: AttentionRequest, rows: Tensor) -> Tensor:
    """Returns how much rounded or projected operands change the output of a few rows, relative to its norm.

    Args:
        program: The layer's plan.
        request: A call with a batch of one and a plain structure.
        rows: `[rows]` query rows.

    Returns:
        `[num_kv_heads, rows]`, the worst query head of each.
    """
    kv_heads, q_len, count = request.key.shape[1], request.query.shape[2], len(rows)
    found = torch.zeros(kv_heads, count, dtype=torch.float32, device="cpu")
    # short calls are computed in the model's precision: repeat rows, so that the sample of a long call is not short
    rows = rows.repeat(-(-PRECISE_ROWS // count)) if q_len >= PRECISE_ROWS > count else rows
    sampled = some_rows(request, rows)
    for choice, heads in program.launches:
        if not choice.operands:
            continue
        part = some_heads(sampled, heads)
        exact = select.attend(part).out[0].float()
        changed = Choice(None, choice.operands).attend(part, heads, program.tensors, None).out[0].float()
        ratio = (changed - exact).norm(dim=-1) / exact.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
        worst = ratio[:count].T.view(len(heads), -1, count).amax(1)
        found[list(heads)] = worst.cpu()
    return found * _rows_of_plan(program, request, rows[:count])


def _rows_of_plan(program: Program, request: AttentionRequest, rows: Tensor) -> Tensor:
    """Returns 1 for each of these rows that the plan covers, 0 for rows beyond its lengths."""
    within = execute.rows_within(request.structure, program.max_length, request.query.device)
    if isinstance(within, Tensor):
        return within[0, rows.to(within.device)].float().cpu()
    return torch.full((len(rows),), float(within), dtype=torch.float32, device="cpu")


@torch.no_grad()
def dropped_mass(program: Program, request: AttentionRequest, rows: Tensor) -> Tensor:
    """Returns the attention mass that the plan drops on a few rows, `[num_kv_heads, rows]`, for the worst query head.

    Args:
        program: The layer's plan.
        request: A call with a batch of one and a plain structure.
        rows: `[rows]` query rows.
    """
    rows = rows.to(request.query.device)
    kv_heads, kv_len = request.key.shape[1], request.key.shape[2]
    group = request.query.shape[1] // kv_heads
    visible = request.structure.visible_rows(rows, rows.device)[0, 0]
    found = torch.zeros(kv_heads, len(rows), dtype=torch.float32, device="cpu")
    for choice, heads in program.launches:
        if choice.keys is None:
            continue
        part = some_heads(request, heads)
        query = part.query[0].view(len(heads), group, -1, part.query.shape[-1])[:, :, rows]
        kept = choice.keys.visible_rows(part, rows)
        if len(kept) > 1:
            kept = kept.view(len(heads), group, *kept.shape[1:])
        # the query heads of a group share the keys without copies; values are not needed
        scores = (query.flatten(1, 2) @ part.key[0].mT).float().view(*query.shape[:3], kv_len)
        scores = scores * request.scaling
        if request.softcap is not None:
            scores = request.softcap * torch.tanh(scores / request.softcap)
        if part.bias is not None:
            bias = part.bias[0].expand(-1, request.query.shape[2], kv_len)[:, rows].float()
            scores = scores + (bias.view(len(heads), group, len(rows), kv_len) if len(bias) > 1 else bias)
        full = scores.masked_fill(~visible, float("-inf")).logsumexp(-1)
        less = scores.masked_fill(~kept, float("-inf")).logsumexp(-1)
        if part.sink_logits is not None:
            sinks = part.sink_logits.float().view(len(heads), group, 1)
            full, less = torch.logaddexp(full, sinks), torch.logaddexp(less, sinks)
        ratio = torch.where(torch.isfinite(full), less - full, torch.zeros_like(full)).clamp(max=0.0)
        found[list(heads)] = (-torch.expm1(ratio)).amax(1).cpu()
    return found * _rows_of_plan(program, request, rows)
