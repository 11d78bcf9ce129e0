"""Runs a layer's plan: heads with the same choice share a launch, which is one call to a backend.

Every choice respects the mask of the call (padding, documents, windows, chunked prefill), softcap and learned sinks, in
prefill and in decode. Rows beyond the calibrated length are exact, decided row by row: neither a longer sequence in the
same batch nor a longer prompt changes what an earlier row computes.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention.call import NAMESPACE, OPERANDS, AttentionCall, AttentionResult, empty_output
from ..attention.gradients import Refusing
from ..attention.heads import joined_heads, some_heads, some_range
from ..attention.infer import infer_structure, numbers_alone
from ..attention.kind import HEAD_WINDOWS, PER_HEAD
from ..attention.runs import restricted
from ..attention.structure import MaskStructure
from ..attention.tracing import jit_trace
from ..backends import select
from ..backends.eager import attention_weights
from .bound_layer import BOUND_LAYERS, BoundLayer, head_rules
from .choices import MIN_PREFILL_ROWS, Choice
from .plan import PlanError


def launch_names(choices: Sequence[Choice], call: AttentionCall) -> dict[str, str]:
    """Maps the label of each choice to the name of its launch; choices with the same name share one launch.

    A choice that no backend computes together with others has a launch of its own.
    """
    kind, names = call.checked_kind(), {choice.label: choice.label for choice in choices}
    for choice in choices:
        if (rule := choice.head_rule(decode=False)) is None:
            continue
        rules = head_rules([rule])
        # exact heads share the launch of heads with rules
        windows = 0 if rule else HEAD_WINDOWS | PER_HEAD
        backend, _ = select.find(kind._replace(features=kind.features | rules.features | windows))
        if backend is not None:
            names[choice.label] = f"{backend.name}: {backend.launch_name(rules.precisions[0])}"
    return names


def attend(bound_layer: BoundLayer, call: AttentionCall, backend: str | None = None) -> AttentionResult:
    """Returns the output of the plan, `[batch, q_len, heads, head_dim_v]`, in the query's dtype.

    A plan for another number of key/value heads is a ValueError.
    """
    layer = bound_layer.of_call(call.key.shape[1], call.query.shape[2])
    if layer is None:
        return select.attend(call, backend)
    if torch.compiler.is_compiling() or jit_trace() is not None:
        return AttentionResult(_traced(layer, call, backend))
    return _by_rows(layer, call, partial(select.attend, backend=backend), partial(_planned, backend))


def weights(bound_layer: BoundLayer, call: AttentionCall) -> Tensor:
    """Returns the attention weights `[batch, heads, q_len, kv_len]` under the plan; ValueError in a traced graph."""
    if torch.compiler.is_compiling():
        raise ValueError(
            f"output_attentions: got True in a traced graph, and the plan of layer {bound_layer.plan.layer} decides by "
            "the data; leave it out, or run the model without torch.compile"
        )
    kv_len = call.key.shape[2]

    def exact(part: AttentionCall) -> AttentionResult:  # with rows where an output has them
        rows = attention_weights(part)
        return AttentionResult(F.pad(rows, (0, kv_len - rows.shape[3])).transpose(1, 2))

    def planned(bound_layer: BoundLayer, part: AttentionCall, decode: bool) -> AttentionResult:
        parts = [
            (heads, exact(choice.defined(some_heads(part, heads), heads, bound_layer.tensors)))
            for choice, heads in bound_layer.heads_by_choice
        ]
        return joined_heads(parts, part.query.shape[1] // part.key.shape[1])

    if (layer := bound_layer.of_call(call.key.shape[1], call.query.shape[2])) is None:
        return attention_weights(call)
    return _by_rows(layer, call, exact, planned).out.transpose(1, 2)


def _by_rows(
    bound_layer: BoundLayer,
    call: AttentionCall,
    exact: Callable[[AttentionCall], AttentionResult],
    planned: Callable[[BoundLayer, AttentionCall, bool], AttentionResult],
) -> AttentionResult:
    if call.stored is not None:
        bound_layer = bound_layer.for_quantised_cache
    if call.bias is not None and (alone := numbers_alone(call)):  # rows that see nothing by any rules are exact
        return _where(alone[0], exact(call), _by_rows(bound_layer, alone[1], exact, planned))
    if call.structure.mask is not None or call.bias is not None:
        inferred = infer_structure(call)
        counting = [choice.label for choice, _ in bound_layer.heads_by_choice if choice.keys is not None]
        if inferred is None and counting:
            raise ValueError(
                "attention_mask: got one (yours, or the model's for images) that is not causal, padded, windowed or of "
                f"documents, and the plan of layer {bound_layer.plan.layer} ({', '.join(counting)}) counts keys from a "
                "sequence's first; pass a mask [batch, kv_len] and no image, or call adaattn_hf.remove_plan(model)"
            )
        call = inferred or call
    structure, limit, rows = call.structure, bound_layer.max_length, call.query.shape[2]
    decode, speaks = bound_layer.speaks_for(structure)
    if isinstance(decode, Tensor):  # steps and prefills in one call
        parts = [replace(call, structure=restricted(structure, chosen)) for chosen in (decode, ~decode)]
        steps, prefills = (_by_rows(bound_layer, part, exact, planned) for part in parts)
        return _where(decode[:, None, :, None], steps, prefills)
    # the plan speaks for all rows before `first` and for none from `last` on; between them rows of a batch differ
    first, last = (rows, rows) if speaks else (0, 0)
    if speaks is None:
        first, last = _ranges(structure, limit, decode) or (0, rows)
    within = rows_within(structure, limit, call.query.device) if first < last else None
    if last == 0 or within is False:
        return exact(call)
    if first == rows:
        return planned(bound_layer, call, decode)
    early = planned(bound_layer, call if last == rows else some_range(call, 0, last), decode)
    late, both = exact(call if first == 0 else some_range(call, first, rows)), last - first
    results = [_narrowed(early, 0, first), _narrowed(late, both, rows - last)]
    if isinstance(within, Tensor):
        mixed = _where(within[:, None, first:last, None], _narrowed(early, first, both), _narrowed(late, 0, both))
        results.insert(1, mixed)
    lses = [result.lse for result in results if result.lse is not None]
    lse = torch.cat(lses, 2) if len(lses) == len(results) else None
    return AttentionResult(torch.cat([result.out for result in results], 1), lse)


def _where(rows: Tensor, result: AttentionResult, other: AttentionResult) -> AttentionResult:
    """Rows `[batch or 1, heads or 1, q_len or 1, 1]` of one result, the rest of another one."""
    rows = rows.to(result.out.device)
    lse = None if result.lse is None or other.lse is None else torch.where(rows[..., 0], result.lse, other.lse)
    return AttentionResult(torch.where(rows.transpose(1, 2), result.out, other.out), lse)


def _narrowed(result: AttentionResult, first: int, count: int) -> AttentionResult:
    lse = None if result.lse is None else result.lse.narrow(2, first, count)
    return AttentionResult(result.out.narrow(1, first, count), lse)


def _ranges(structure: MaskStructure, limit: int, decode: bool) -> tuple[int, int] | None:
    # `first` and `last` of `_by_rows`, for a causal call. None where each row has to be looked at, where a step would
    # have to ask a device, and where so few rows are within that alone they would be computed in another precision.
    padding = structure.key_padding
    if not structure.causal or (decode and padding is not None and padding.is_cuda):
        return None
    if not (structure.one_offset and structure.one_run_a_row and isinstance(structure.q_offset, int)):
        return None
    first, last = (
        min(max(limit - structure.offset() + start, 0), structure.q_len) for start in structure.cached(_starts)
    )
    return None if not decode and 0 < min(last, limit) < MIN_PREFILL_ROWS else (first, last)


def _starts(structure: MaskStructure) -> tuple[int, int]:
    # the least and the largest key index of a row's first token; asks the device once for all layers
    padding = structure.key_padding
    least, most = structure.first_token("cpu" if padding is None else padding.device)[:, 0].aminmax()
    return int(least), int(most)


def rows_within(structure: MaskStructure, limit: int, device: torch.device) -> bool | Tensor:
    """Returns which rows a plan for sequences up to `limit` speaks for: all, none, or `[batch or 1, q_len]`.

    Causal: rows at a position below `limit` of their sequence, since no later key changes them. Bidirectional:
    all rows of sequences of up to `limit` tokens. Reads no data: a structure whose keys all fit answers at once,
    whatever its padding.
    """
    if (within := structure.within(limit)) is not None:
        return within
    if structure.causal:
        return structure.positions(device) < limit
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
    rows = max(len(ordered), len(queries))
    ordered, queries = (numbers.expand(rows, -1).contiguous() for numbers in (ordered, queries))
    return torch.searchsorted(ordered, queries, right=True) - torch.searchsorted(ordered, queries) <= limit


def _planned(backend: str | None, bound_layer: BoundLayer, call: AttentionCall, decode: bool) -> AttentionResult:
    if not (decode or bound_layer.has_gradient) and call.checked_kind().needs_grad:
        inputs = {name: getattr(call, name) for name in ("query", "key", "value", "bias", "sink_logits")}
        bare: dict[str, Any] = {name: None if tensor is None else tensor.detach() for name, tensor in inputs.items()}
        out, lse = _planned(backend, bound_layer, replace(call, **bare), decode)
        error = PlanError(no_gradient(bound_layer))
        (out,) = Refusing.apply(error, 1, out, *inputs.values())  # type: ignore[no-untyped-call]
        return AttentionResult(out, lse)
    launch = bound_layer.decode if decode else bound_layer.prefill
    parts: list[tuple[Sequence[int], AttentionResult]] = []
    if launch.heads:
        together = replace(some_heads(call, launch.heads) if launch.separate else call, per_head=launch.rules)
        if (kernel := select.kernel_of(together, backend)) is not None:
            if not launch.separate:
                return kernel(together)
            parts.append((launch.heads, kernel(together)))
    for choice, heads in launch.separate if parts else bound_layer.heads_by_choice:
        part = some_heads(call, heads)
        parts.append((heads, choice.attend(part, heads, bound_layer.tensors, backend)))
    return joined_heads(parts, call.query.shape[1] // call.key.shape[1])


def no_gradient(bound_layer: BoundLayer) -> str:
    """Returns the sentence for training under a layer's plan without a gradient."""
    lost = ", ".join(choice.label for choice, _ in bound_layer.heads_by_choice if not choice.has_gradient)
    return (
        f"plan of layer {bound_layer.plan.layer}: {lost} rounds to int8, which has no gradient; train with "
        "adaattn_hf.remove_plan(model), or calibrate without int8 (--families window,bf16)"
    )


# It asks the host: a CUDA graph must not hold it, which torch cannot be told before 2.9.
_UNSAFE = getattr(torch.Tag, "cudagraph_unsafe", None)
_TAGS: dict[str, Any] = {} if _UNSAFE is None else {"tags": (_UNSAFE,)}


@torch.library.custom_op(
    f"{NAMESPACE}::planned",
    mutates_args=(),
    schema=f"({OPERANDS}, SymInt? own_window, SymInt layer, str? backend) -> Tensor",
    **_TAGS,
)
def planned_op(*inputs: Any) -> Tensor:
    """Runs a layer's plan as one node of a traced graph, as it runs without a graph."""
    *operands, own_window, handle, backend = inputs
    bound_layer = BOUND_LAYERS.get(handle)
    if bound_layer is None:
        raise RuntimeError(
            "the plan that this graph was compiled with is gone; compile the model again after a plan is loaded"
        )
    # a copy that was compiled before it computed once has none
    if (owner := bound_layer.owner and bound_layer.owner()) is not None:
        owner.check_graph(bound_layer)  # no hook of the model is called in a graph
    call = AttentionCall.of_operands(*operands)
    call.window = own_window
    call.check()
    call = infer_structure(call) or call
    call = replace(call, structure=call.structure.simplified())
    with torch.no_grad():
        return attend(bound_layer, call, backend).out.contiguous()


planned_op.register_fake(empty_output)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_whole(handle: int, kv_heads: int) -> bool:
    # constant, as what is worked out once is not for a traced graph to do
    launch = BOUND_LAYERS[handle].decode
    return not launch.separate and len(launch.heads) == kv_heads


def _traced(bound_layer: BoundLayer, call: AttentionCall, backend: str | None) -> Tensor:
    # Exporters and torch.jit trace without Dynamo, but for strict exports. A graph of torch 2.11 that asks
    # `is_exporting` is always told so, and torch 2.6 has no such function.
    compiler = torch.compiler
    elsewhere = not compiler.is_dynamo_compiling() and (compiler.is_compiling() or jit_trace() is not None)
    if elsewhere or getattr(compiler, "_is_exporting_flag", False):
        raise ValueError(
            f"plan of layer {bound_layer.plan.layer}: a plan belongs to this process and cannot be exported; export "
            "the model after adaattn_hf.remove_plan(model)"
        )
    if call.checked_kind().needs_grad:
        raise ValueError(
            f"plan of layer {bound_layer.plan.layer}: a compiled plan has no gradient; run the model under "
            "torch.no_grad(), train without torch.compile, or without a plan after adaattn_hf.remove_plan(model)"
        )
    structure, dropped = call.structure, call.structure.dropped
    if (
        isinstance(structure.q_offset, Tensor)
        and call.query.shape[2] == 1
        and call.bias is None
        and structure.mask is None
        and structure.causal
        and not (isinstance(dropped, Tensor) or dropped)  # the rules end by places among the keys that are held
        and _is_whole(bound_layer.handle, call.key.shape[1])
    ):
        # a step of a preallocated cache is one call
        launch = bound_layer.decode
        step = replace(call, per_head=launch.rules if structure.kv_len <= bound_layer.max_length else launch.ending)
        if (kernel := select.kernel_of(step, backend)) is not None:
            return kernel(step).out
    out: Tensor = planned_op(*call.operands(), call.window, bound_layer.handle, backend)
    return out
