"""Calls of the C library: tensors and rules are packed into its argument structure, and the answer is unpacked."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...attention.call import head_dim_of
from .guard import check_rule, readable
from .library import BACKWARD, CALL, DTYPES, LAYOUT, loaded
from .rules import NO_RULES, NONE4, Rules, pointer

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


def without_memory() -> RuntimeError:
    """The error of a call whose output has no memory to be written to."""
    return RuntimeError(
        "the native kernels were given no memory to write to: a dispatch mode (FakeTensorMode, say) makes tensors "
        'without any; use attn_implementation="adaattn_sdpa" under it'
    )


def packed(
    inputs: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor | None,
    scaling: float,
    level: int,
    rules: bytes,
    backward: bytes = NO_BACKWARD,
) -> bytes:
    """The argument structure of a call; every tensor in it must outlive the call.

    `inputs` are those that the rules were checked for. `out` `[batch, q_len, heads, head_dim_v]` is contiguous, and so
    is `lse` `[batch, heads, q_len]`, None where it is not computed. `level` is the number of an instruction set.
    """
    if type(out) is not Tensor:
        raise without_memory()
    q, k, v = inputs
    batch, heads, q_len, dim = q.shape
    dim_v = head_dim_of(v)
    layout = LAYOUT.pack(
        DTYPES[q.dtype], DTYPES[k.dtype], DTYPES[v.dtype], batch, heads, k.shape[1], q_len, k.shape[2], dim, dim_v,
        *q.stride(), *k.stride(), *v.stride(), q_len * heads * dim_v, dim_v, heads * dim_v, 1,
    )  # fmt: skip
    return CALL.pack(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), pointer(lse), layout, scaling,
        torch.get_num_threads(), level, rules, backward,
    )  # fmt: skip


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
    """Attention without autograd: `out` `[batch, q_len, heads, head_dim_v]` and `lse` `[batch, heads, q_len]`.

    Its tensors are those of an `AttentionCall` that asks for something.

    Args:
        q: `[batch, heads, q_len, head_dim]`, any strides.
        k: `[batch, num_kv_heads, kv_len, head_dim]`, in the query's dtype or int8.
        v: `[batch, num_kv_heads, kv_len, head_dim_v]`; beside int8 keys also uint8 with half the channels, two values
            of four bits to a byte.
        scaling: Factor on the scores.
        rules: Everything else.
        need_lse: Also return the log-sum-exp, in nats; good to 1e-4 with bfloat16 products, to 1e-5 else.
        level: Number of an instruction set, for tests; the library's own choice when None.

    Raises:
        RuntimeError: The library is missing or refuses the call.
    """
    native = loaded()
    q, k, v = readable(q, "query"), readable(k, "key"), readable(v, "value")
    rules.check(*q.shape, *k.shape[1:3])
    batch, heads, q_len, _ = q.shape
    # plain tensors, whatever subclass the query is of
    out = torch.empty(batch, q_len, heads, head_dim_of(v), dtype=q.dtype, device="cpu")
    lse = torch.empty(batch, heads, q_len, dtype=torch.float32, device="cpu") if need_lse else None
    level = native.level if level is None else level
    if status := native.forward(packed((q, k, v), out, lse, scaling, level, rules.packed())):
        raise error_of(status)
    return out, lse


class Gradients(NamedTuple):
    """Gradients of one call; `bias` is fp32 `[batch, heads, q_len, kv_len]`, None where not asked for."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scaling: float,
    rules: Rules = NO_RULES,
    *,
    need_bias: bool = False,
    level: int | None = None,
) -> Gradients:
    """Gradients of `forward`, recomputed from `lse`; the same numbers every time, for any number of threads.

    `grad` has any strides, `out` and `lse` are what `forward` returned; keys and values are not int8. With `need_bias`
    comes the gradient of the bias. A library that is missing or refuses the call is a RuntimeError.
    """
    native = loaded()
    q, k, v, grad, out, lse = (
        readable(tensor, name)
        for name, tensor in zip(("query", "key", "value", "grad", "out", "lse"), (q, k, v, grad, out, lse), strict=True)
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
    dbias = torch.zeros((*q.shape[:3], k.shape[2]), dtype=torch.float32, device="cpu") if need_bias else None
    g = grad.transpose(1, 2)
    tail = BACKWARD.pack(
        g.data_ptr(), *g.stride(), dq.data_ptr(), dk.data_ptr(), dv.data_ptr(),
        *dq.stride(), *dk.stride(), *dv.stride(),
        *((0, *NONE4) if dbias is None else (dbias.data_ptr(), *dbias.stride())),
    )  # fmt: skip
    rules.check(*q.shape, *k.shape[1:3])
    level = native.level if level is None else level
    asked = packed((q, k, v), out, lse, scaling, level, rules.packed(), tail)
    if status := native.handle.ada_backward(asked):
        raise error_of(status)
    return Gradients(dq, dk, dv, dbias)
