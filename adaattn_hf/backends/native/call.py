"""One call of the C library: tensors and rules become the words of its argument structure."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .library import library, missing

__all__ = ["NO_RULES", "Rules", "forward"]

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
COMPUTE = {"model": 0, "bf16": 1, "int8": 2}
_NONE4 = (0, 0, 0, 0)
_NONE3 = (0, 0, 0)
# q k v out lse | dtypes, extents | strides | segments | rules | head rules | scaling softcap | sinks | bias | mask |
# scales | blocks | threads level | backward
_LAYOUT = struct.Struct("=5Q" + "3q7q" + "16q" + "Q2q" + "3q" + "2Q" + "2d" + "Q" + "Q5q" + "Q4q" + "2Q6q" + "2Q2q" + "2q" + "Q4q3Q12qQQ4q")
_FORWARD_TAIL = (0, *_NONE4, 0, 0, 0, *_NONE4 * 3, 0, 0, *_NONE4)
_ERRORS = {
    -1: "the native kernels were called with inconsistent extents or segments outside the tensors",
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
        block_ptr, block_index: int64 lists of key blocks of 64 per key/value head and query block.
        block_q: Query rows per query block.
        compute: Precision of the products, a key of `COMPUTE`.
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
    block_ptr: Tensor | None = None
    block_index: Tensor | None = None
    block_q: int = 0
    compute: str = "model"


NO_RULES = Rules()


def _pointer(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def _broadcast(t: Tensor) -> tuple[int, ...]:
    """Strides of `t`, 0 along the extents that it repeats."""
    return tuple(0 if size == 1 else step for size, step in zip(t.shape, t.stride(), strict=True))


def words(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    scaling: float,
    rules: Rules,
    level: int,
    tail: Sequence[int] = _FORWARD_TAIL,
) -> bytes:
    """The argument structure of a call; every tensor in it must outlive the call."""
    batch, heads, q_len, dim = q.shape
    _, kv_heads, kv_len, dim_v = v.shape
    r = rules
    blocks = 0
    if r.block_ptr is not None:
        blocks = (r.block_ptr.shape[0] - 1) // kv_heads
    return _LAYOUT.pack(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), _pointer(out), _pointer(lse),
        _DTYPES[q.dtype], _DTYPES[k.dtype], COMPUTE[r.compute],
        batch, heads, kv_heads, q_len, kv_len, dim, dim_v,
        *q.stride(), *k.stride(), *v.stride(), *(_NONE4 if out is None else out.stride()),
        _pointer(r.segments), 0 if r.segments is None else r.segments.shape[0], r.offset,
        r.causal, r.window, r.sinks,
        _pointer(r.head_windows), _pointer(r.head_sinks),
        scaling, r.softcap,
        _pointer(r.sink_logits),
        _pointer(r.bias), *((0, *_NONE4) if r.bias is None else (_DTYPES[r.bias.dtype], *_broadcast(r.bias))),
        _pointer(r.mask), *(_NONE4 if r.mask is None else _broadcast(r.mask)),
        _pointer(r.key_scale), _pointer(r.value_scale),
        *(_NONE3 if r.key_scale is None else r.key_scale.stride()),
        *(_NONE3 if r.value_scale is None else r.value_scale.stride()),
        _pointer(r.block_ptr), _pointer(r.block_index), r.block_q, blocks,
        torch.get_num_threads(), level,
        *tail,
    )  # fmt: skip


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
        need_lse: Also return the log-sum-exp, in nats.
        need_out: False computes the log-sum-exp alone.
        level: Number of an instruction set, for tests; the library's own choice when None.

    Raises:
        RuntimeError: The library is missing or refuses the call.
    """
    native = library()
    if native is None:
        raise RuntimeError(f"native backend: {'; '.join(missing())}")
    batch, heads, q_len, _ = q.shape
    out = torch.empty((batch, q_len, heads, v.shape[3]), dtype=q.dtype) if need_out else None
    lse = torch.empty((batch, heads, q_len), dtype=torch.float32) if need_lse else None
    view = None if out is None else out.transpose(1, 2)
    status = native.handle.ada_forward(
        words(q, k, v, view, lse, scaling, rules, native.level if level is None else level)
    )
    if status:
        raise RuntimeError(_ERRORS[status])
    return out, lse
