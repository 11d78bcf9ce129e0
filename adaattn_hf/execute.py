"""Running a layer's plan: heads of one choice share a launch, and a launch is a request to a backend.

Every choice is true to the mask of the call (padding, documents, windows, chunked prefill), to softcap and to
learned sinks, in prefill and in decode. Rows beyond the calibrated length are exact, row by row: neither a
longer neighbour in the batch nor a longer prompt changes what an earlier row computes.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from adaattn_hf import native_launch
from adaattn_hf.approximate import (
    PRECISE_ROWS,
    Program,
    blocks_apply,
    defined,
    heads_of,
    ranked,
    rounded,
    windowed,
)
from adaattn_hf.backends.eager import attention_weights
from adaattn_hf.backends.select import choose
from adaattn_hf.plan import BLOCK, EXACT, Choice
from adaattn_hf.request import AttentionRequest, AttentionResult, CallSpec
from adaattn_hf.selection import keep_blocks, pooled_keys
from adaattn_hf.structure import CallStructure, Segment

TILE = 64
"""Query rows that share one gather of key blocks."""
DEVICE_TILE = 2048
"""The same off the CPU, where a launch costs more than the keys that a smaller tile would spare."""


def launches(program: Program) -> list[tuple[Choice, list[int]]]:
    """Returns the choices of a layer with the key/value heads that take each, in order of first appearance."""
    groups: dict[Choice, list[int]] = {}
    for head, choice in enumerate(program.plan.choices):
        groups.setdefault(choice, []).append(head)
    return list(groups.items())


def launch_name(choice: Choice, shared: bool) -> str:
    """Returns the name of the launch that serves a choice; choices of one name share a launch.

    Args:
        choice: The choice.
        shared: Whether the native kernels serve the call; see `native_launch`.
    """
    return native_launch.name(choice) if shared and native_launch.takes(choice) else choice.label


def attend(program: Program, request: AttentionRequest, backend: str | None = None) -> AttentionResult:
    """Returns what the plan computes, `[batch, q_len, heads, head_dim_v]`, in the query's dtype.

    Args:
        program: The layer's plan and tensors.
        request: The call.
        backend: Name of the backend that every launch must use; chosen per launch when absent.

    Raises:
        ValueError: If the plan is for another number of key/value heads.
    """
    kv_heads = request.key.shape[1]
    if kv_heads != len(program.plan.choices):
        raise ValueError(
            f"plan of layer {program.plan.layer}: made for {len(program.plan.choices)} key/value heads, got keys with "
            f"{kv_heads}; calibrate the model in the form in which it runs (tensor parallelism splits heads)"
        )
    within = rows_within(request.structure, program.max_length, request.query.device)
    if within is False:
        return launch(request, backend)
    result = _planned(program, request, backend)
    if within is True:
        return result
    exact = launch(request, backend)
    out = torch.where(within[:, :, None, None], result.out, exact.out)
    if result.lse is None or exact.lse is None:
        return AttentionResult(out)
    return AttentionResult(out, torch.where(within[:, None], result.lse, exact.lse))


def weights(program: Program, request: AttentionRequest) -> Tensor:
    """Returns the attention weights `[batch, heads, q_len, kv_len]` of the function that the plan computes."""
    within = rows_within(request.structure, program.max_length, request.query.device)
    if within is False:
        return attention_weights(request)
    parts, order = [], []
    for choice, heads in launches(program):
        part = heads_of(request, heads)
        parts.append(attention_weights(defined(part, choice, heads, program.tensors)))
        order += heads
    planned = _in_order(parts, order, request, dim=1)
    if within is True:
        return planned
    return torch.where(within[:, None, :, None], planned, attention_weights(request))


def rows_within(structure: CallStructure, limit: int, device: torch.device) -> bool | Tensor:
    """Returns which rows a plan for sequences up to `limit` speaks for: all, none, or `[batch or 1, q_len]`.

    Causal: rows at a position below `limit` of their sequence, since no later key changes them. Bidirectional:
    all rows of sequences of up to `limit` tokens. Reads no data: a structure whose keys all fit answers at once,
    whatever its padding.
    """
    if structure.kv_len <= limit:
        return True
    if not structure.causal:
        return _rows_of_short(structure, limit, device)
    if structure.plain and isinstance(structure.q_offset, int):
        if structure.q_offset + structure.q_len <= limit:
            return True
        if structure.q_offset >= limit:
            return False
    place = torch.arange(structure.q_len, device=device) + structure.q_offset
    start = structure._sequence_start(device)
    at = start.gather(1, place.clamp(0, structure.kv_len - 1)[None].expand(start.shape[0], -1))
    return place[None] - at < limit


def _rows_of_short(structure: CallStructure, limit: int, device: torch.device) -> bool | Tensor:
    """Rows of bidirectional sequences of up to `limit` real tokens."""
    real = structure.key_padding
    if structure.k_segments is None:
        if real is None:
            return False
        return (real.to(device).sum(1, keepdim=True) <= limit).expand(-1, structure.q_len)
    keys = structure.k_segments.to(device)
    queries = keys if structure.q_segments is None else structure.q_segments.to(device)
    if real is not None:
        keys = torch.where(real.to(device), keys, torch.iinfo(keys.dtype).min)  # no document's number
    ordered = keys.sort(dim=1).values
    queries = queries.expand(ordered.shape[0], -1).contiguous()
    return torch.searchsorted(ordered, queries, right=True) - torch.searchsorted(ordered, queries) <= limit


def _planned(program: Program, request: AttentionRequest, backend: str | None) -> AttentionResult:
    shared = native_launch.serves(request, backend)
    few = request.query.shape[2] < PRECISE_ROWS
    groups: dict[str, list[int]] = {}
    for head, choice in enumerate(program.plan.choices):
        name = launch_name(choice, shared)
        if shared and few and native_launch.takes(choice):
            name = native_launch.name(choice, few)
        groups.setdefault(name, []).append(head)
    results, order = [], []
    for heads in groups.values():
        part = heads_of(request, heads)
        choices = [program.plan.choices[head] for head in heads]
        if shared and native_launch.takes(choices[0]):
            mean = program.tensors.key_mean
            mean = None if mean is None else mean[heads]
            results.append(
                native_launch.attend(part, choices, "model" if few else choices[0].precision, mean)
            )
        else:
            results.append(_group(program, part, choices[0], heads, backend))
        order += heads
    out = _in_order([result.out for result in results], order, request, dim=2)
    if not request.need_lse:
        return AttentionResult(out)
    return AttentionResult(
        out, _in_order([r.lse for r in results if r.lse is not None], order, request, dim=1)
    )


def _in_order(parts: list[Tensor], order: list[int], request: AttentionRequest, dim: int) -> Tensor:
    """The parts of the launches, heads back in the model's order."""
    joined = parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)
    groups = request.query.shape[1] // request.key.shape[1]
    if order == sorted(order):
        return joined
    place = {head: index for index, head in enumerate(order)}
    index = [place[head] * groups + member for head in sorted(order) for member in range(groups)]
    return joined.index_select(dim, torch.tensor(index, device=joined.device))


def _group(
    program: Program, request: AttentionRequest, choice: Choice, heads: list[int], backend: str | None
) -> AttentionResult:
    """One launch: the heads of one choice."""
    if choice == EXACT:
        return launch(request, backend)
    dtype = request.query.dtype
    changed = cast(ranked(request, choice, heads, program.tensors), choice, heads, program)
    if choice.kind == "window":
        result = launch(replace(changed, structure=windowed(request.structure, choice)), backend)
    elif choice.kind == "blocks":
        result = _blocks(changed, request, choice, backend)
    else:
        result = launch(changed, backend)
    return AttentionResult(result.out.to(dtype), result.lse)


def cast(request: AttentionRequest, choice: Choice, heads: list[int], program: Program) -> AttentionRequest:
    """Operands in the choice's precision: cast where torch computes in it, rounded where it does not."""
    if choice.precision == "bf16" and request.query.shape[2] >= PRECISE_ROWS:
        low = torch.bfloat16
        return replace(
            request,
            query=request.query.to(low),
            key=request.key.to(low),
            value=request.value.to(low),
            bias=None if request.bias is None else request.bias.to(low),
        )
    if choice.precision == "int8" and CallSpec.of(request).needs_grad:
        raise ValueError(
            f"plan of layer {program.plan.layer}: {choice.label} rounds to int8, which has no gradient; train with "
            "adaattn_hf.remove_plan(model), or calibrate without int8 (--families window,bf16)"
        )
    tensors = program.tensors if not choice.rank else type(program.tensors)()
    return rounded(request, choice, heads, tensors)


def launch(request: AttentionRequest, backend: str | None) -> AttentionResult:
    """Returns what the chosen backend computes for one request."""
    return choose(CallSpec.of(request, look=backend is not None), backend).attend(request)


def _blocks(
    changed: AttentionRequest, original: AttentionRequest, choice: Choice, backend: str | None
) -> AttentionResult:
    """Attention over kept blocks, one gather of keys per tile of rows; exact where the mask is not made of runs.

    Args:
        changed: The request with projected or rounded operands, which are what is computed with.
        original: The request as it came, which is what blocks are selected by.
        choice: The choice of the group.
        backend: Name of the backend, or `None`.
    """
    runs = blocks_apply(original)
    if runs is None:
        return launch(changed, backend)
    query, value = changed.query, changed.value
    batch, heads, q_len, _ = query.shape
    out = query.new_zeros(batch, q_len, heads, value.shape[3])
    lse = torch.full((batch, heads, q_len), float("-inf"), device=query.device) if changed.need_lse else None
    for run in runs:
        for head in range(changed.key.shape[1]):
            _run_of_head(changed, original, choice, backend, run, head, out, lse)
    return AttentionResult(out, lse)


def _run_of_head(
    changed: AttentionRequest,
    original: AttentionRequest,
    choice: Choice,
    backend: str | None,
    run: Segment,
    head: int,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Writes one run of one key/value head into `out` and `lse`."""
    groups = changed.query.shape[1] // changed.key.shape[1]
    members = slice(head * groups, (head + 1) * groups)
    keys = slice(run.k_start, run.k_start + run.k_len)
    device = changed.query.device
    positions = torch.arange(run.q_len, device=device) + run.offset
    keep = keep_blocks(
        original.query[run.row, members, run.q_start : run.q_start + run.q_len][None],
        pooled_keys(original.key[run.row, head : head + 1, keys]),
        positions,
        run.k_len,
        mass=choice.mass,
        sinks=choice.sinks,
        scaling=original.scaling,
        causal=original.structure.causal,
        softcap=original.softcap,
    )[0]
    key, value = changed.key[run.row, head, keys], changed.value[run.row, head, keys]
    inside = torch.arange(BLOCK, device=device)
    tile = TILE if device.type == "cpu" else DEVICE_TILE
    for start in range(0, run.q_len, tile):
        stop = min(start + tile, run.q_len)
        used = keep[start:stop].any(0).nonzero()[:, 0]
        columns = (used[:, None] * BLOCK + inside).flatten()
        columns = columns[columns < run.k_len]
        mask = keep[start:stop][:, columns.div(BLOCK, rounding_mode="floor")]
        if original.structure.causal:
            mask = mask & (columns <= positions[start:stop, None])
        rows = slice(run.q_start + start, run.q_start + stop)
        part = launch(
            replace(
                changed,
                query=changed.query[run.row : run.row + 1, members, rows],
                key=key[columns][None, None],
                value=value[columns][None, None],
                structure=CallStructure(1, stop - start, len(columns), mask=mask[None, None]),
                sink_logits=None if changed.sink_logits is None else changed.sink_logits[members],
            ),
            backend,
        )
        out[run.row, rows, members] = part.out[0]
        if lse is not None and part.lse is not None:
            lse[run.row, members, rows] = part.lse[0]
