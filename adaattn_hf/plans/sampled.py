"""Measures choices on a few rows of a call: the attention mass that they drop, and the change by their operands."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..attention.call import AttentionCall
from ..attention.heads import some_heads, some_rows
from ..attention.segments import Segment
from ..attention.structure import MaskStructure
from ..backends import select
from ..backends.eager import attention_weights
from . import execute
from .bound_layer import BoundLayer
from .choices import EXACT, MIN_PREFILL_ROWS, Choice
from .tensors import LayerTensors


def one_run(call: AttentionCall, turn: int) -> AttentionCall | None:
    """Returns one segment of a call as a call of its own, chosen by turn; None if the mask has no segments.

    Of a padded call without the queries that are padding themselves: those beside the segment's keys.
    """
    structure = call.structure
    segments = structure.segments()
    if not segments:
        return None
    run: Segment = segments[turn % len(segments)]
    if structure.key_padding is not None:
        before, stop = max(0, -run.offset), min(run.q_len, run.k_len - run.offset)
        if before >= stop:
            return None
        run = run._replace(q_start=run.q_start + before, q_len=stop - before, offset=run.offset + before)
    queries, keys = slice(run.q_start, run.q_start + run.q_len), slice(run.k_start, run.k_start + run.k_len)
    row, bias = slice(run.row, run.row + 1), call.bias
    if bias is not None:
        bias = bias if bias.shape[0] == 1 else bias[row]
        bias = bias if bias.shape[2] == 1 else bias[:, :, queries]
        bias = bias if bias.shape[3] == 1 else bias[..., keys]
    plain = MaskStructure(1, run.q_len, run.k_len, structure.causal, run.offset, structure.window, structure.sinks)
    query, key, value = call.query[row, :, queries], call.key[row, :, keys], call.value[row, :, keys]
    return replace(call, query=query, key=key, value=value, structure=plain, bias=bias)


@torch.no_grad()
def row_outputs(
    call: AttentionCall,
    rows: Tensor,
    choices: Sequence[Choice],
    tensors: LayerTensors,
    heads: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns what choices, the first of them exact, make of a few rows of a batch of one, and what they lose there.

    Args:
        rows: `[rows]` query rows.
        choices: Choices that all its heads take, one after the other.
        tensors: Bases and means of the layer.
        heads: Which key/value heads of the layer the call has; all by default.

    Returns:
        Outputs `[choices, heads, rows, head_dim_v]`, and losses `[choices, heads, rows]`: the attention mass that is
        dropped, plus the change of the output by rounded or projected operands, relative to its norm.
    """
    heads, kv_len = range(call.key.shape[1]) if heads is None else heads, call.key.shape[2]
    sampled = some_rows(call, rows)
    weights = attention_weights(sampled)[0]
    outputs: list[Tensor] = []
    losses: list[Tensor] = []
    for choice in choices:
        structure = call.structure if choice.keys is None else choice.keys.structure(call)
        mask = structure.visible(rows=rows, device=call.query.device)
        changed = choice.running(sampled, list(heads), tensors)
        part = select.attend(replace(changed, structure=MaskStructure(1, len(rows), kv_len, mask=mask)))
        outputs.append(part.out[0].transpose(0, 1).float())
        lost = (weights * ~mask[0]).sum(-1).float()
        if choice.operands:
            size = outputs[0].norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
            lost = lost + (outputs[-1] - outputs[0]).norm(dim=-1) / size
        losses.append(lost)
    return torch.stack(outputs), torch.stack(losses)


def losses(bound_layer: BoundLayer, call: AttentionCall, rows: Tensor) -> Tensor:
    """Losses `[num_kv_heads, rows]` of a plan, of each the worst query head, as `row_outputs` measures them.

    The call has a batch of one and a plain structure. Rows beyond the plan's lengths lose 0.
    """
    kv_heads, q_len, count = call.key.shape[1], call.query.shape[2], len(rows)
    totals = torch.zeros(kv_heads, count, dtype=torch.float32, device="cpu")
    # short calls are computed in the model's precision: repeat rows, so that the sample of a long call is not short
    many = rows.repeat(-(-MIN_PREFILL_ROWS // count)) if q_len >= MIN_PREFILL_ROWS > count else rows
    for choice, heads in bound_layer.heads_by_choice:
        part = some_heads(call, heads)
        # each by itself, as calibration measures them
        for alone, at in ((Choice(choice.keys), rows), (Choice(None, choice.operands), many)):
            if not alone.is_exact:
                _, lost = row_outputs(part, at.to(part.query.device), [EXACT, alone], bound_layer.tensors, heads)
                totals[list(heads)] += lost[1, :, :count].view(len(heads), -1, count).amax(1).cpu()
    within = execute.rows_within(call.structure, bound_layer.max_length, call.query.device)
    return totals * (within[0, rows.to(within.device)].cpu() if isinstance(within, Tensor) else within)
