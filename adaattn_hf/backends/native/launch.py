"""Launches of the native kernels: what a kind of call decides is packed once, addresses and lengths at each call."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...attention.call import AttentionCall, AttentionResult, head_dim_of, narrowed
from ...attention.gradients import first_order, sink_gradient
from ...attention.heads import HeadRules, joined_heads, some_heads
from ...attention.kind import BIAS, LSE, SINKS, SINKS_AWAY, SOFTCAP, SUBCLASS, CallKind
from ..base import Kernel
from .library import BACKWARD, CALL, DTYPES, LAYOUT, loaded
from .rules import FLOATS, NO_RULES, NONE4, NOTHING_ELSE, OFFSETS, Rules, check_rule, codes_packed, find_rules, readable

_FIND_RULES = (find_rules,)
_new = tuple.__new__

_EXTRAS = SOFTCAP | SINKS | BIAS | LSE | SUBCLASS

NO_BACKWARD = bytes(BACKWARD.size)
ERRORS = {
    -1: "the native kernels were called with inconsistent extents, with segments outside the "
    "tensors, or backward with int8 keys",
    -2: "the native kernels ran out of memory",
    -3: "the native kernels have no code for the instruction set that was asked for",
}
"""What a status of the library stands for."""


def kernel_of(kind: CallKind, rules: HeadRules | None) -> Kernel:
    """Calls of one kind as one call of the library each, without a gradient; one for each precision of their heads."""
    groups = [] if rules is None else groups_of(rules, kind.dtype)
    masked = kind.features & SINKS_AWAY == SINKS_AWAY
    in_full: Kernel = (lambda call: by_groups(call, groups, masked)) if groups else computed
    if masked or kind.features & _EXTRAS or len(groups) > 1 or (groups and groups[0][1].key_mean is not None):
        return in_full
    # the groups keep alive the windows that are packed
    native, of_heads = loaded(), (groups[0][1] if groups else NO_RULES).heads_packed()
    heads, dim_v = kind.heads, kind.head_dim_v

    def launch(call: AttentionCall) -> AttentionResult:
        query, key, value, structure = call.query, call.key, call.value, call.structure
        shared = structure.made.get(_FIND_RULES) or structure.cached(find_rules)  # by the layers of a pass
        codes = NOTHING_ELSE if call.stored is None else codes_packed(call.stored, key)
        try:
            # as `in_memory` asks of each, without a call for each in every layer; the kind says the device
            in_place = (
                (q_at := query.data_ptr()) > OFFSETS
                and (k_at := key.data_ptr()) > OFFSETS
                and (v_at := value.data_ptr()) > OFFSETS
                and not (query.is_neg() or key.is_neg() or value.is_neg())
            )
        except (RuntimeError, NotImplementedError):
            in_place = False  # sparse tensors and the like have no storage to ask for
        if codes is None or not in_place:
            call.check()  # tensors that must be written out first, or refused
            return in_full(call)
        if rules is not None and shared.mask is not None:
            return in_full(call)
        out = query.new_empty(structure.batch, structure.q_len, heads, dim_v)
        packed = shared.visible + of_heads + codes
        run(native.forward, (query, key, value), (q_at, k_at, v_at), (out, None), call.scaling, packed, native.level)
        return _new(AttentionResult, (out, None))  # without a call of Python for each layer

    return launch


def groups_of(
    rules: HeadRules, dtype: torch.dtype, windows: Sequence[tuple[int | None, int]] | None = None
) -> list[tuple[tuple[int, ...], Rules]]:
    """The calls of the library for heads with rules of their own, whose queries have a dtype: one for each precision.

    Each is the key/value heads that it serves, and what it asks for of them.
    Where `windows` (and sinks) of the heads are given, heads of a call have one in common, and it asks for none.
    """
    heads_by_rule: dict[tuple[str, Any], list[int]] = {}
    for head, precision in enumerate(rules.precisions):
        heads_by_rule.setdefault((precision, None if windows is None else windows[head]), []).append(head)
    groups = []
    for (precision, _), heads in heads_by_rule.items():
        # products of half precision are those of the model, but for int8
        of_heads = Rules(compute=precision if precision == "int8" or dtype == torch.float32 else "model")
        if windows is None:
            lengths = [rules.windows[head] or -1 for head in heads]
            of_heads.head_windows = torch.tensor(lengths, dtype=torch.int64, device="cpu")
            of_heads.head_sinks = torch.tensor([rules.sinks[head] for head in heads], dtype=torch.int64, device="cpu")
        if precision == "int8" and rules.key_mean is not None:
            of_heads.key_mean = rules.key_mean.detach()[heads].float()[None].contiguous()
        groups.append((tuple(heads), of_heads))
    return groups


def by_groups(call: AttentionCall, groups: Sequence[tuple[tuple[int, ...], Rules]], masked: bool) -> AttentionResult:
    """Any call whose heads have rules of their own.

    Where a mask says what queries see, or sinks count from elsewhere than where runs begin (`masked`), each head's
    window becomes part of a mask: there heads of one window share a call.
    """
    rules, structure = call.per_head, call.structure
    assert rules is not None
    shared, windows = NO_RULES if masked else structure.cached(find_rules), None
    if masked or shared.mask is not None:
        windows = rules.windows_in(structure)
        groups = groups_of(rules, call.query.dtype, windows)
    results: list[tuple[tuple[int, ...], AttentionResult]] = []
    for heads, of_heads in groups:
        part = some_heads(call, heads)
        if windows is not None:
            window, sinks = windows[heads[0]]
            shared = find_rules(part.structure.with_changes(window=window, sinks=sinks))
        part_rules = replace(
            shared, compute=of_heads.compute, key_mean=of_heads.key_mean,
            head_windows=of_heads.head_windows, head_sinks=of_heads.head_sinks,
        )  # fmt: skip
        results.append((heads, computed(part, part_rules)))
    return joined_heads(results, call.query.shape[1] // call.key.shape[1])


def computed(call: AttentionCall, rules: Rules | None = None) -> AttentionResult:
    """The library's answer to any call whose heads all do the same, without a gradient; `rules` as in `rules_of`."""
    rules = rules_of(call, rules)
    return AttentionResult(*forward(call.query, call.key, call.value, call.scaling, rules, need_lse=call.need_lse))


def rules_of(call: AttentionCall, rules: Rules | None = None) -> Rules:
    """All that a call asks for beside its tensors; `rules` stand for those of its structure."""
    rules = call.structure.cached(find_rules) if rules is None else rules
    stored, bias, changes = call.stored, call.bias, dict[str, Any]()
    if stored is not None:
        changes = dict(
            key_scale=stored.key_scale, value_scale=stored.value_scale, key_mean=stored.key_mean,
            first_key=stored.first_key,
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


def differentiated(call: AttentionCall) -> AttentionResult:
    """The same with gradients."""
    inputs = call.query, call.key, call.value, call.bias, call.sink_logits
    return AttentionResult(*_Differentiable.apply(*inputs, call.scaling, rules_of(call)))  # type: ignore[no-untyped-call]


class _Differentiable(torch.autograd.Function):
    """The kernels with their own backward, which makes the weights again from the log-sum-exp; that has no gradient."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        """Computes the output and the log-sum-exp; the rules, which come last, already hold bias and learned sinks."""
        q, k, v, bias, sinks, scaling, rules = inputs
        out, lse = forward(q, k, v, scaling, rules, need_lse=True)
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
        trained_bias, need_sinks = bias if ctx.needs_input_grad[3] else None, ctx.needs_input_grad[4]
        dq, dk, dv, dbias = backward(grad, (q, k, v, out, lse), ctx.scaling, ctx.rules, bias=trained_bias)
        dsinks = sink_gradient(grad, out, lse, sinks) if need_sinks else None
        return dq, dk, dv, dbias, dsinks, None, None


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scaling: float,
    rules: Rules = NO_RULES,
    *,
    need_lse: bool = False,
    level: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention without autograd: `out` `[batch, q_len, heads, head_dim_v]` and `lse` `[batch, heads, q_len]`, in nats.

    The tensors, of any strides, are those of an `AttentionCall` that asks for something: `q` `[batch, heads, q_len,
    head_dim]`; `k` `[batch, num_kv_heads, kv_len, head_dim]`, in the query's dtype or int8; `v` alike, beside int8 keys
    also uint8 with half the channels, two values of four bits to a byte. `lse` is good to 1e-4 with bfloat16 products,
    to 1e-5 else, and None without `need_lse`. `level` is the number of an instruction set, for tests, else the
    library's choice. RuntimeError: the library is missing or refuses the call.
    """
    native = loaded()
    (q, k, v), packed = rules.packed(q, k, v)
    batch, heads, q_len, _ = q.shape
    # plain tensors, whatever subclass the query is of
    out = torch.empty(batch, q_len, heads, head_dim_of(v), dtype=q.dtype, device="cpu")
    lse = torch.empty(batch, heads, q_len, dtype=torch.float32, device="cpu") if need_lse else None
    level = native.level if level is None else level
    addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
    run(native.forward, (q, k, v), addresses, (out, lse), scaling, packed, level)
    return out, lse


def backward(
    grad: Tensor,
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    scaling: float,
    rules: Rules = NO_RULES,
    *,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key, value and bias; the same numbers every time, for any number of threads.

    `grad` has any strides; `saved` are query, key and value, which are not int8, and what `forward` returned; `bias` is
    one that wants a gradient, as the call has it. A library that is missing or refuses the call is a RuntimeError.
    """
    native = loaded()
    q, k, v, out, lse = saved
    (q, k, v), packed = rules.packed(q, k, v)
    out, lse, grad = readable("out", out), readable("lse", lse), readable("grad", grad)
    shape = (q.shape[0], q.shape[2], q.shape[1], v.shape[3])
    check_rule("grad", grad, shape, q.dtype, "strided")
    check_rule("out", out, shape, q.dtype, "contiguous")
    check_rule("lse", lse, tuple(q.shape[:3]), torch.float32, "contiguous")
    # queries and keys of no segment are not written to
    make = torch.empty if rules.segments is None else torch.zeros
    dq = make(q.shape, dtype=q.dtype, device="cpu")
    dk = torch.zeros(k.shape, dtype=k.dtype, device="cpu")
    dv = torch.zeros(v.shape, dtype=v.dtype, device="cpu")
    dbias = torch.zeros((*q.shape[:3], k.shape[2]), dtype=torch.float32, device="cpu") if bias is not None else None
    g = grad.transpose(1, 2)
    tail = BACKWARD.pack(
        g.data_ptr(), *g.stride(), dq.data_ptr(), dk.data_ptr(), dv.data_ptr(),
        *dq.stride(), *dk.stride(), *dv.stride(),
        *((0, *NONE4) if dbias is None else (dbias.data_ptr(), *dbias.stride())),
    )  # fmt: skip
    addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
    run(native.handle.ada_backward, (q, k, v), addresses, (out, lse), scaling, packed, native.level, tail)
    return dq, dk, dv, None if bias is None or dbias is None else dbias.sum_to_size(bias.shape).to(bias.dtype)


def run(
    function: Callable[[bytes], int],
    tensors: tuple[Tensor, Tensor, Tensor],
    addresses: tuple[int, int, int],
    outputs: tuple[Tensor, Tensor | None],
    scaling: float,
    rules: bytes,
    level: int,
    backward: bytes = NO_BACKWARD,
) -> None:
    """Packs the argument structure of a call, and calls `ada_forward` or `ada_backward`, the function, by it.

    `tensors` are query, key and value, which lie at `addresses` and for which the rules were checked. `outputs` are
    contiguous: `out` `[batch, q_len, heads, head_dim_v]` and `lse` `[batch, heads, q_len]`, where it is computed. What
    `rules` and `backward` point to, packed, must outlive the call. `level` is the number of an instruction set.
    """
    (query, key, value), (out, lse) = tensors, outputs
    if type(out) is not Tensor:
        raise RuntimeError(
            "the native kernels were given no memory to write to: a dispatch mode (FakeTensorMode, say) makes tensors "
            'without any; use attn_implementation="adaattn_sdpa" under it'
        )
    batch, heads, q_len, dim = query.shape
    _, kv_heads, kv_len, _ = key.shape
    dim_v = out.shape[3]
    layout = LAYOUT.pack(
        DTYPES[query.dtype], DTYPES[key.dtype], DTYPES[value.dtype],
        batch, heads, kv_heads, q_len, kv_len, dim, dim_v,
        *query.stride(), *key.stride(), *value.stride(), q_len * heads * dim_v, dim_v, heads * dim_v, 1,
    )  # fmt: skip
    arguments = CALL.pack(
        *addresses, out.data_ptr(), 0 if lse is None else lse.data_ptr(), layout, scaling,
        torch.get_num_threads(), level, rules, backward,
    )  # fmt: skip
    if status := function(arguments):
        raise RuntimeError(ERRORS[status])
