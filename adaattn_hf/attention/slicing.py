"""Parts of a call: the definition of rules per head as a mask; some heads or rows of it; heads put together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .call import AttentionCall, AttentionResult
from .heads import HeadRules
from .rounding import through_dtype, through_int8
from .structure import MaskStructure


def reference_call(call: AttentionCall) -> AttentionCall:
    """Returns the call without rules per head whose exact attention is the same: the definition of `HeadRules`.

    Queries, keys and values are rounded in their own dtype, and a dense mask says what each head sees.
    """
    rules = call.per_head
    if rules is None:
        return call
    call = _rounded(replace(call, per_head=None), rules)
    if not any(rules.windows):
        return call
    kv_heads, structure = call.key.shape[1], call.structure
    groups = call.query.shape[1] // kv_heads
    masks, beyond = [], None
    if rules.until is not None:
        device = call.query.device
        beyond = structure.visible(device=device) & (structure.positions(device)[:, None, :, None] >= rules.until)
    for head in range(kv_heads):
        window, sinks = rules.window_in(structure, head)
        own = structure.with_changes(window=window, sinks=sinks).visible(device=call.query.device)
        if beyond is not None:
            own = own | beyond
        if own.shape[1] > 1:
            own = own[:, head * groups : (head + 1) * groups]
        masks.append(own.expand(call.query.shape[0], groups, *own.shape[2:]))
    return replace(call, structure=structure.with_changes(mask=torch.cat(masks, dim=1)))


def _rounded(call: AttentionCall, rules: HeadRules) -> AttentionCall:
    if set(rules.precisions) == {"model"}:
        return call
    kv_heads = call.key.shape[1]
    groups = call.query.shape[1] // kv_heads
    parts: list[list[Tensor]] = [[], [], []]
    for head, precision in enumerate(rules.precisions):
        query = call.query[:, head * groups : (head + 1) * groups]
        key, value = call.key[:, head : head + 1], call.value[:, head : head + 1]
        if precision == "bf16":
            query, key, value = (through_dtype(t, torch.bfloat16) for t in (query, key, value))
        elif precision == "int8":
            # the mean is added back: softcapped scores and learned sinks would feel a shift of all scores
            mean = 0.0 if rules.key_mean is None else rules.key_mean[head].to(key)
            query, key, value = through_int8(query), through_int8(key - mean) + mean, through_int8(value)
        for part, tensor in zip(parts, (query, key, value), strict=True):
            part.append(tensor)
    query, key, value = (torch.cat(part, dim=1) for part in parts)
    return replace(call, query=query, key=key, value=value)


def picked(tensor: Tensor, index: Sequence[int], dim: int) -> Tensor:
    """Returns these entries of a dimension, a view where they adjoin.

    They are put together of views: an index would have to be copied to the device, which no graph can capture.
    """
    runs: list[list[int]] = []
    for at in index:
        if runs and at == sum(runs[-1]):
            runs[-1][1] += 1
        else:
            runs.append([at, 1])
    parts = [tensor.narrow(dim, first, count) for first, count in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def some_heads(call: AttentionCall, kv_heads: Sequence[int]) -> AttentionCall:
    """Returns the call of a few key/value heads and the query heads that share them; views where they adjoin."""
    total, groups = call.key.shape[1], call.query.shape[1] // call.key.shape[1]
    if list(kv_heads) == list(range(total)):
        return call
    heads = [head * groups + member for head in kv_heads for member in range(groups)]
    structure = call.structure
    if structure.mask is not None and structure.mask.shape[1] > 1:
        structure = structure.with_changes(mask=picked(structure.mask, heads, 1))
    bias = call.bias
    return replace(
        call,
        query=picked(call.query, heads, 1),
        key=picked(call.key, kv_heads, 1),
        value=picked(call.value, kv_heads, 1),
        stored=None if call.stored is None else call.stored.of_heads(kv_heads),
        structure=structure,
        sink_logits=None if call.sink_logits is None else picked(call.sink_logits, heads, 0),
        bias=bias if bias is None or bias.shape[1] == 1 else picked(bias, heads, 1),
        per_head=None if call.per_head is None else call.per_head.some(kv_heads),
    )


def some_rows(call: AttentionCall, rows: Tensor) -> AttentionCall:
    """Returns the call of a few query `rows` `[rows]` against all keys, with a dense mask of what they see."""
    if call.per_head is not None:  # which counts rows of the whole call
        call = reference_call(call.dequantised())
    device, structure, bias = call.query.device, call.structure, call.bias
    visible, rows = structure.visible(rows=rows, device=device), rows.to(device)
    return replace(
        call,
        query=call.query.index_select(2, rows),
        structure=MaskStructure(structure.batch, len(rows), structure.kv_len, mask=visible),
        bias=bias if bias is None or bias.shape[-2] == 1 else bias[..., rows, :],
    )


def some_range(call: AttentionCall, first: int, stop: int) -> AttentionCall:
    """Returns the call of the query rows from `first` to before `stop` of a causal call, plain or padded.

    Keys after the last of these rows are left out, unless they are codes, whose record speaks of all of them.
    """
    structure, key, value, bias = call.structure, call.key, call.value, call.bias
    seen = structure.kv_len if call.stored is not None else min(structure.kv_len, structure.offset() + stop)
    if bias is not None:
        bias = bias if bias.shape[-2] == 1 else bias[..., first:stop, :]
        bias = bias if bias.shape[-1] == 1 else bias[..., :seen]
    return replace(
        call,
        query=call.query[:, :, first:stop],
        key=key[:, :, :seen],
        value=value[:, :, :seen],
        structure=structure.cached(_range_of, first, stop, seen),
        bias=bias,
    )


def _range_of(structure: MaskStructure, first: int, stop: int, seen: int) -> MaskStructure:
    padding = None if structure.key_padding is None else structure.key_padding[:, :seen]
    return structure.with_changes(
        q_len=stop - first, kv_len=seen, q_offset=structure.offset() + first, key_padding=padding
    )


def joined_heads(parts: Sequence[tuple[Sequence[int], AttentionResult]], groups: int) -> AttentionResult:
    """Returns the results of several `some_heads` as one, in the model's order of heads.

    Each comes with its key/value heads, each of which has `groups` query heads.
    """
    place = {head: (part, at) for part, (heads, _) in enumerate(parts) for at, head in enumerate(heads)}
    places = [place[head] for head in sorted(place)]

    def together(tensors: list[Tensor], dim: int) -> Tensor:
        if list(place) == sorted(place):
            return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)
        return torch.cat([tensors[part].narrow(dim, at * groups, groups) for part, at in places], dim)

    lses = [result.lse for _, result in parts if result.lse is not None]
    out, lse = together([result.out for _, result in parts], 2), together(lses, 1) if lses else None
    return AttentionResult(out, lse)
