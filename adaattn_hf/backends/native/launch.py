"""Launches of the native kernels: what a kind of call decides is packed once, addresses and lengths at each call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...attention.call import AttentionCall, AttentionResult, narrowed
from ...attention.gradients import first_order, sink_gradient
from ...attention.heads import HeadRules, joined_heads, some_heads
from ...attention.kind import BIAS, LSE, SINKS, SOFTCAP, SUBCLASS, CallKind
from ...attention.structure import MaskStructure
from ..base import Kernel
from . import entry
from .guard import FLOATS, OFFSETS
from .library import HEADS, loaded
from .rules import ALL_ALIKE, COMPUTE, NOTHING_ELSE, Rules, codes_packed, find_rules

_FIND_RULES = (find_rules,)
_new = tuple.__new__

_EXTRAS = SOFTCAP | SINKS | BIAS | LSE | SUBCLASS


def kernel_of(kind: CallKind, rules: HeadRules | None) -> Kernel:
    """Calls of one kind as one call of the library each, without a gradient; one for each precision of their heads."""
    groups = [] if rules is None else groups_of(rules, kind.dtype)
    in_full: Kernel = (lambda call: by_groups(call, groups)) if groups else computed
    if kind.features & _EXTRAS or len(groups) > 1 or (groups and groups[0].key_mean is not None):
        return in_full
    native, of_heads = loaded(), groups[0].packed if groups else ALL_ALIKE
    heads, dim_v, sinks = kind.heads, kind.head_dim_v, rules is not None and any(rules.sinks)

    def launch(call: AttentionCall) -> AttentionResult:
        query, key, value, structure = call.query, call.key, call.value, call.structure
        seen = structure.made.get(_FIND_RULES) or structure.cached(find_rules)
        end = NOTHING_ELSE if call.stored is None else codes_packed(call.stored, key)
        try:
            # as `guard.lies` asks of each, without a call for each in every layer; the kind says the device
            readable = (
                (q_at := query.data_ptr()) > OFFSETS
                and (k_at := key.data_ptr()) > OFFSETS
                and (v_at := value.data_ptr()) > OFFSETS
                and not (query.is_neg() or key.is_neg() or value.is_neg())
            )
        except (RuntimeError, NotImplementedError):
            readable = False  # sparse tensors and the like have no storage to ask for
        at_runs = rules is None or (seen.mask is None and (seen.sinks_at_runs or not sinks))
        if end is None or not readable or not at_runs:
            # tensors that must be written out first, and masks
            call.check()
            return in_full(call)
        out = query.new_empty(structure.batch, structure.q_len, heads, dim_v)
        packed = seen.visible + of_heads + end
        entry.run(
            native.forward, (query, key, value), (q_at, k_at, v_at), (out, None), call.scaling, packed, native.level
        )
        return _new(AttentionResult, (out, None))  # without a call of Python for each layer

    return launch


def asked_of(call: AttentionCall, rules: Rules | None = None) -> Rules:
    """All that a call asks for beside its tensors; `rules` stand for those of its structure."""
    rules = call.structure.cached(find_rules) if rules is None else rules
    stored, bias, changes = call.stored, call.bias, dict[str, Any]()
    if stored is not None:
        changes = dict(
            key_scale=stored.key_scale, value_scale=stored.value_scale, key_mean=stored.key_mean,
            first_key=stored.first_key, rotated=3 if stored.rotated else 0,
        )  # fmt: skip
    if bias is not None:
        bias = bias.detach()
        bias = (bias if bias.dtype in FLOATS else narrowed(bias, torch.float32)).resolve_neg()
        changes["bias"] = bias.expand(*bias.shape[:3], call.key.shape[2]) if bias.shape[3] == 1 else bias
    if call.sink_logits is not None:
        changes["sink_logits"] = call.sink_logits.detach().float().resolve_neg().contiguous()
    if call.softcap is not None:
        changes["softcap"] = call.softcap
    return replace(rules, **changes) if changes else rules


def computed(call: AttentionCall, rules: Rules | None = None) -> AttentionResult:
    """The library's answer to any call whose heads all do the same, without a gradient; `rules` as in `asked_of`."""
    tensors, asked = (call.query, call.key, call.value), asked_of(call, rules)
    return AttentionResult(*entry.forward(*tensors, call.scaling, asked, need_lse=call.need_lse))


class _Differentiable(torch.autograd.Function):
    """The kernels with their own backward, which makes the weights again from the log-sum-exp; that has no gradient."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        """Computes the output and the log-sum-exp; the rules, which come last, already hold bias and learned sinks."""
        q, k, v, bias, sinks, scaling, rules = inputs
        out, lse = entry.forward(q, k, v, scaling, rules, need_lse=True)
        assert lse is not None
        ctx.save_for_backward(q, k, v, bias, sinks, out, lse)
        ctx.scaling, ctx.rules = scaling, rules
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of query, key, value, bias and learned sinks."""
        q, k, v, bias, sinks, out, lse = ctx.saved_tensors
        wanted, need_sinks = bias if ctx.needs_input_grad[3] else None, ctx.needs_input_grad[4]
        dq, dk, dv, dbias = entry.backward(grad, (q, k, v, out, lse), ctx.scaling, ctx.rules, bias=wanted)
        dsinks = sink_gradient(grad, out, lse, sinks) if need_sinks else None
        return dq, dk, dv, dbias, dsinks, None, None


def differentiated(call: AttentionCall) -> AttentionResult:
    """The same with gradients."""
    inputs = call.query, call.key, call.value, call.bias, call.sink_logits
    return AttentionResult(*_Differentiable.apply(*inputs, call.scaling, asked_of(call)))  # type: ignore[no-untyped-call]


class Group(NamedTuple):
    """Key/value heads of one precision, which one call of the library serves.

    `packed` points to `tensors`, windows and sinks, int64 `[heads]`. Int8 products take `key_mean`, fp32 `[1, heads,
    head_dim]`, off the keys.
    """

    heads: tuple[int, ...]
    packed: bytes
    tensors: tuple[Tensor, Tensor]
    precision: str
    key_mean: Tensor | None


def groups_of(rules: HeadRules, dtype: torch.dtype, structure: MaskStructure | None = None) -> list[Group]:
    """The calls of the library for heads with rules of their own, whose queries have a dtype.

    With a `structure` heads of a group have one window in it, too.
    """
    alike: dict[tuple[str, tuple[int | None, int] | None], list[int]] = {}
    for head, precision in enumerate(rules.precisions):
        window = None if structure is None else rules.window_in(structure, head)
        alike.setdefault((precision, window), []).append(head)
    found = []
    for (precision, _), heads in alike.items():
        # products of half precision are those of the model, but for int8
        compute = precision if precision == "int8" or dtype == torch.float32 else "model"
        windows = torch.tensor([rules.windows[head] or -1 for head in heads], dtype=torch.int64, device="cpu")
        sinks = torch.tensor([rules.sinks[head] for head in heads], dtype=torch.int64, device="cpu")
        packed = HEADS.pack(COMPUTE[compute], windows.data_ptr(), sinks.data_ptr())
        mean = None
        if precision == "int8" and rules.key_mean is not None:
            mean = rules.key_mean.detach()[heads].float()[None].contiguous()
        found.append(Group(tuple(heads), packed, (windows, sinks), compute, mean))
    return found


def by_groups(call: AttentionCall, groups: Sequence[Group]) -> AttentionResult:
    """Any call whose heads have rules of their own.

    Where a mask says what queries see, or sinks count from elsewhere than where runs begin, each head's window becomes
    part of a mask: there heads of one window share a call.
    """
    rules, structure = call.per_head, call.structure
    assert rules is not None
    seen = structure.cached(find_rules)
    dense = seen.mask is not None or (any(rules.sinks) and not seen.sinks_at_runs)
    if dense:
        groups = groups_of(rules, call.query.dtype, structure)
    results: list[tuple[tuple[int, ...], AttentionResult]] = []
    for group in groups:
        part = some_heads(call, group.heads)
        if dense:
            window, sinks = rules.window_in(structure, group.heads[0])
            asked = find_rules(part.structure.with_changes(window=window, sinks=sinks))
        else:
            asked = replace(seen, head_windows=group.tensors[0], head_sinks=group.tensors[1])
        asked = replace(asked, compute=group.precision, key_mean=group.key_mean)
        results.append((group.heads, computed(part, asked)))
    return joined_heads(results, call.query.shape[1] // call.key.shape[1])
