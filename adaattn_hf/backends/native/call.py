"""One call of the C library: tensors and rules become the words of its argument structure."""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .library import library, missing

__all__ = ["NO_RULES", "Gradients", "Rules", "backward", "forward"]

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
COMPUTE = {"model": 0, "bf16": 1, "int8": 2}
_NONE4 = (0, 0, 0, 0)
_NONE3 = (0, 0, 0)
_HEAD = struct.Struct("=5Q2q7q16qd2q")  # tensors, dtypes, extents, strides, scaling, threads, level
_RULES = struct.Struct("=qQ2q3q2QdQQ5qQ4q2Q6qQ5qQ")
_TAIL = struct.Struct("=Q4q3Q12qQ4q")  # backward
_FORWARD_TAIL = bytes(_TAIL.size)
_ERRORS = {
    -1: "the native kernels were called with inconsistent extents, with segments outside the tensors, too few "
    "blocks, or backward with int8 keys or kept blocks",
    -2: "the native kernels ran out of memory",
    -3: "the native kernels have no code for the instruction set that was asked for",
}


@dataclass(frozen=True, eq=False)
class Rules:
    """What a call asks for beyond its tensors; see `src/adaattn.h`.

    Attributes:
        causal, window, sinks, offset: As in `CallStructure`; a window below 0 is none.
        segments: int64 `[n, 6]` of (row, q_start, q_len, k_start, k_len, offset), or None for one segment per row.
        head_windows, head_sinks: int64 `[num_kv_heads]`, in place of `window` and `sinks`.
        softcap: 0 for none.
        sink_logits: fp32 `[heads]`.
        bias: Float, `[batch or 1, heads or 1, q_len or 1, kv_len]`.
        mask: Bool, `[batch or 1, heads or 1, q_len or 1, kv_len]`.
        key_scale, value_scale: fp32 `[batch, num_kv_heads, kv_len]` of int8 keys and values.
        keep: Bool, `[batch or 1, num_kv_heads or 1, q_len or 1, blocks]`, which blocks of 64 keys a row keeps, counted
            from the first key of the row's segment; None for all.
        compute: Precision of the products, a key of `COMPUTE`; int8 needs the level avx512_bf16.
        key_mean: fp32 `[num_kv_heads, head_dim]`, contiguous, subtracted from keys before they are rounded to int8.
    """

    causal: bool = False
    window: int = -1
    sinks: int = 0
    offset: int = 0
    segments: Tensor | None = None
    head_windows: Tensor | None = None
    head_sinks: Tensor | None = None
    softcap: float = 0.0
    sink_logits: Tensor | None = None
    bias: Tensor | None = None
    mask: Tensor | None = None
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    keep: Tensor | None = None
    compute: str = "model"
    key_mean: Tensor | None = None

    @functools.cached_property
    def packed(self) -> bytes:
        """The rules' part of the argument structure; made once, because rules are shared by the layers of a model."""
        bias, mask, keep = self.bias, self.mask, self.keep
        return _RULES.pack(
            COMPUTE[self.compute],
            _pointer(self.segments), 0 if self.segments is None else self.segments.shape[0], self.offset,
            self.causal, self.window, self.sinks,
            _pointer(self.head_windows), _pointer(self.head_sinks),
            self.softcap,
            _pointer(self.sink_logits),
            _pointer(bias), *((0, *_NONE4) if bias is None else (_DTYPES[bias.dtype], *_broadcast(bias))),
            _pointer(mask), *(_NONE4 if mask is None else _broadcast(mask)),
            _pointer(self.key_scale), _pointer(self.value_scale),
            *(_NONE3 if self.key_scale is None else self.key_scale.stride()),
            *(_NONE3 if self.value_scale is None else self.value_scale.stride()),
            _pointer(keep), *((*_NONE4, 0) if keep is None else (*_broadcast(keep), keep.shape[3])),
            _pointer(self.key_mean),
        )  # fmt: skip


def _pointer(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def _broadcast(t: Tensor) -> tuple[int, ...]:
    """Strides of `t`, 0 along the extents that it repeats."""
    return tuple(0 if size == 1 else step for size, step in zip(t.shape, t.stride(), strict=True))


NO_RULES = Rules()


def words(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    scaling: float,
    rules: Rules,
    level: int,
    tail: bytes = _FORWARD_TAIL,
) -> bytes:
    """The argument structure of a call; every tensor in it must outlive the call.

    `out` is contiguous `[batch, q_len, heads, head_dim_v]`.
    """
    batch, heads, q_len, dim = q.shape
    _, kv_heads, kv_len, dim_v = v.shape
    width = heads * dim_v
    head = _HEAD.pack(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), 0 if out is None else out.data_ptr(),
        0 if lse is None else lse.data_ptr(),
        _DTYPES[q.dtype], _DTYPES[k.dtype],
        batch, heads, kv_heads, q_len, kv_len, dim, dim_v,
        *q.stride(), *k.stride(), *v.stride(), q_len * width, dim_v, width, 1,
        scaling, torch.get_num_threads(), level,
    )  # fmt: skip
    return head + rules.packed + tail


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scaling: float,
    rules: Rules = NO_RULES,
    *,
    need_lse: bool = False,
    need_out: bool = True,
    level: int | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Attention without autograd: `out` `[batch, q_len, heads, head_dim_v]` and `lse` `[batch, heads, q_len]`.

    Args:
        q: `[batch, heads, q_len, head_dim]`, any strides.
        k: `[batch, num_kv_heads, kv_len, head_dim]`, in the query's dtype or int8.
        v: `[batch, num_kv_heads, kv_len, head_dim_v]`.
        scaling: Factor on the scores.
        rules: Everything else.
        need_lse: Also return the log-sum-exp, in nats; good to 1e-4 with bfloat16 products, to 1e-5 else.
        need_out: False computes the log-sum-exp alone.
        level: Number of an instruction set, for tests; the library's own choice when None.

    Raises:
        RuntimeError: The library is missing or refuses the call.
    """
    native = library()
    if native is None:
        raise RuntimeError(f"native backend: {'; '.join(missing())}")
    # small calls cost as much here as in the library: nothing is asked for twice
    batch, heads, q_len, _ = q.shape
    out = q.new_empty((batch, q_len, heads, v.shape[3])) if need_out else None
    lse = q.new_empty((batch, heads, q_len), dtype=torch.float32) if need_lse else None
    status = native.forward(
        words(q, k, v, out, lse, scaling, rules, native.level if level is None else level)
    )
    if status:
        raise RuntimeError(_ERRORS[status])
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

    Args:
        grad: Gradient of `out`, `[batch, q_len, heads, head_dim_v]`, any strides.
        q, k, v, scaling, rules, level: As in `forward`, without int8 and kept blocks.
        out: What `forward` returned, contiguous.
        lse: What `forward` returned.
        need_bias: Also return the gradient of the bias.

    Raises:
        RuntimeError: The library is missing or refuses the call.
    """
    native = library()
    if native is None:
        raise RuntimeError(f"native backend: {'; '.join(missing())}")
    dq = (
        torch.zeros(q.shape, dtype=q.dtype)
        if rules.segments is not None
        else torch.empty(q.shape, dtype=q.dtype)
    )
    dk, dv = torch.zeros(k.shape, dtype=k.dtype), torch.zeros(v.shape, dtype=v.dtype)
    dbias = torch.zeros((*q.shape[:3], k.shape[2]), dtype=torch.float32) if need_bias else None
    g = grad.transpose(1, 2)
    tail = _TAIL.pack(
        g.data_ptr(), *g.stride(), dq.data_ptr(), dk.data_ptr(), dv.data_ptr(),
        *dq.stride(), *dk.stride(), *dv.stride(), _pointer(dbias), *(_NONE4 if dbias is None else dbias.stride()),
    )  # fmt: skip
    status = native.handle.ada_backward(
        words(q, k, v, out, lse, scaling, rules, native.level if level is None else level, tail)
    )
    if status:
        raise RuntimeError(_ERRORS[status])
    return Gradients(dq, dk, dv, dbias)
