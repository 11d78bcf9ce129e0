"""Calls of the C library: tensors and rules are packed into its argument structure, and the answer is unpacked."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...attention.call import head_dim_of
from .guard import check_rule, readable
from .library import BACKWARD, CALL, DTYPES, LAYOUT, loaded
from .rules import NO_RULES, NONE4, Rules

NO_BACKWARD = bytes(BACKWARD.size)
_ERRORS = {
    -1: "the native kernels were called with inconsistent extents, with segments outside the "
    "tensors, or backward with int8 keys",
    -2: "the native kernels ran out of memory",
    -3: "the native kernels have no code for the instruction set that was asked for",
}


def error_of(status: int) -> RuntimeError:
    """The error that a status of the library stands for."""
    return RuntimeError(_ERRORS[status])


def run(
    function: Callable[[bytes], int],
    tensors: tuple[Tensor, Tensor, Tensor],
    places: tuple[int, int, int],
    outputs: tuple[Tensor, Tensor | None],
    scaling: float,
    rules: bytes,
    level: int,
    backward: bytes = NO_BACKWARD,
) -> None:
    """Packs the argument structure of a call, and calls `ada_forward` or `ada_backward`, the function, by it.

    `tensors` are query, key and value, which lie at `places` and for which the rules were checked. `outputs` are
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
    asked = CALL.pack(
        *places, out.data_ptr(), 0 if lse is None else lse.data_ptr(), layout, scaling,
        torch.get_num_threads(), level, rules, backward,
    )  # fmt: skip
    if status := function(asked):
        raise error_of(status)


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
    q, k, v = readable(q, "query"), readable(k, "key"), readable(v, "value")
    rules.check(*q.shape, *k.shape[1:3])
    batch, heads, q_len, _ = q.shape
    # plain tensors, whatever subclass the query is of
    out = torch.empty(batch, q_len, heads, head_dim_of(v), dtype=q.dtype, device="cpu")
    lse = torch.empty(batch, heads, q_len, dtype=torch.float32, device="cpu") if need_lse else None
    level = native.level if level is None else level
    places = q.data_ptr(), k.data_ptr(), v.data_ptr()
    run(native.forward, (q, k, v), places, (out, lse), scaling, rules.packed(), level)
    return out, lse


def backward(
    grad: Tensor,
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    scaling: float,
    rules: Rules = NO_RULES,
    *,
    bias: Tensor | None = None,
    level: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key, value and bias; the same numbers every time, for any number of threads.

    `grad` has any strides; `saved` are query, key and value, which are not int8, and what `forward` returned; `bias` is
    one that wants a gradient, as the call has it. A library that is missing or refuses the call is a RuntimeError.
    """
    native = loaded()
    q, k, v, out, lse, grad = (
        readable(tensor, name)
        for name, tensor in zip(("query", "key", "value", "out", "lse", "grad"), (*saved, grad), strict=True)
    )
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
    rules.check(*q.shape, *k.shape[1:3])
    level = native.level if level is None else level
    places = q.data_ptr(), k.data_ptr(), v.data_ptr()
    run(native.handle.ada_backward, (q, k, v), places, (out, lse), scaling, rules.packed(), level, tail)
    return dq, dk, dv, None if bias is None or dbias is None else dbias.sum_to_size(bias.shape).to(bias.dtype)
