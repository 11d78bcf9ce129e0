"""One call of the C library: tensors and rules become the words of its argument structure."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .guard import Form, check_extents, check_rule, readable
from .library import BACKWARD, CALL, RULES, library, missing

__all__ = ["NO_RULES", "Gradients", "Rules", "backward", "forward"]

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3, torch.uint8: 4}
_SCALES = {torch.float32: 0, torch.uint8: 5}
COMPUTE = {"model": 0, "bf16": 1, "int8": 2}
_FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float16))
_CODES = frozenset((torch.int8, torch.uint8))
_MOST_EXTENTS = 64
_NONE4 = (0, 0, 0, 0)
_NONE3 = (0, 0, 0)
_FORWARD_TAIL = bytes(BACKWARD.size)
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
        key_scale, value_scale: `[batch, num_kv_heads, kv_len]` of int8 keys and values (or values of four bits), both
            fp32 or both in the eight bits of `StoredKV`.
        keep: Bool, `[batch or 1, num_kv_heads or 1, q_len or 1, blocks]`, which blocks of 64 keys a row keeps, counted
            from the first key of the row's segment; None for all.
        compute: Precision of the products, a key of `COMPUTE`; int8 needs the level avx512_bf16.
        key_mean: fp32 `[batch or 1, num_kv_heads, head_dim]`, contiguous, subtracted from keys before they are rounded
            to int8, here or by whoever stored them.
        first_key: fp32 `[batch, num_kv_heads, head_dim]`, contiguous; stands for the first of the stored keys.
        rotated: 1 where stored keys, 2 where stored values are those of vectors turned by `hadamard`, 3 for both.
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
    first_key: Tensor | None = None
    rotated: int = 0

    @functools.cached_property
    def _tensors(self) -> bool:
        """Whether any rule lies in a tensor, whose extents the call must have."""
        return any(isinstance(value, Tensor) for value in vars(self).values())

    @functools.cached_property
    def _checked(self) -> set[tuple[int, ...]]:
        """Extents of the calls for which the tensors were found to fit."""
        return set()

    def check(self, batch: int, heads: int, q_len: int, dim: int, kv_heads: int, kv_len: int) -> None:
        """Refuse tensors that do not fit a call of these extents; looked at once for each.

        Raises:
            ValueError: Names the rule, what it has and what it should have.
        """
        call = (batch, heads, q_len, dim, kv_heads, kv_len)
        if not self._tensors or call in self._checked:
            return
        scores = (batch, heads, q_len, kv_len)
        scale = (
            torch.uint8
            if self.key_scale is not None and self.key_scale.dtype is torch.uint8
            else torch.float32
        )
        means = 1 if self.key_mean is not None and self.key_mean.shape[:1] == (1,) else batch
        asked: tuple[tuple[str, tuple[int, ...], torch.dtype | None, Form], ...] = (
            ("segments", (-1, 6), torch.int64, "contiguous"),
            ("head_windows", (kv_heads,), torch.int64, "contiguous"),
            ("head_sinks", (kv_heads,), torch.int64, "contiguous"),
            ("sink_logits", (heads,), torch.float32, "contiguous"),
            ("bias", scores, None, "broadcast"),
            ("mask", scores, torch.bool, "broadcast"),
            ("key_scale", (batch, kv_heads, kv_len), scale, "strided"),
            ("value_scale", (batch, kv_heads, kv_len), scale, "strided"),
            ("keep", (batch, kv_heads, q_len, -1), torch.bool, "broadcast"),
            ("key_mean", (means, kv_heads, dim), torch.float32, "contiguous"),
            ("first_key", (batch, kv_heads, dim), torch.float32, "contiguous"),
        )
        for name, extents, dtype, form in asked:
            tensor: Tensor | None = getattr(self, name)
            if tensor is None:
                continue
            check_rule(name, tensor, extents, dtype, form)
        if len(self._checked) >= _MOST_EXTENTS:
            self._checked.clear()
        self._checked.add(call)

    @functools.cached_property
    def packed(self) -> bytes:
        """The rules' part of the argument structure; made once, because rules are shared by the layers of a model."""
        bias, mask, keep = self.bias, self.mask, self.keep
        return RULES.pack(
            COMPUTE[self.compute],
            _pointer(self.segments), 0 if self.segments is None else self.segments.shape[0], self.offset,
            self.causal, self.window, self.sinks,
            _pointer(self.head_windows), _pointer(self.head_sinks),
            self.softcap,
            _pointer(self.sink_logits),
            _pointer(bias), *((0, *_NONE4) if bias is None else (_DTYPES[bias.dtype], *_broadcast(bias))),
            _pointer(mask), *(_NONE4 if mask is None else _broadcast(mask)),
            _pointer(self.key_scale), _pointer(self.value_scale),
            0 if self.key_scale is None else _SCALES[self.key_scale.dtype],
            *(_NONE3 if self.key_scale is None else self.key_scale.stride()),
            *(_NONE3 if self.value_scale is None else self.value_scale.stride()),
            _pointer(self.first_key), self.rotated,
            _pointer(keep), *((*_NONE4, 0) if keep is None else (*_broadcast(keep), keep.shape[3])),
            _pointer(self.key_mean), 0 if self.key_mean is None else _broadcast(self.key_mean)[0],
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
    if v.dtype is torch.uint8:
        dim_v *= 2
    rules.check(batch, heads, q_len, dim, kv_heads, kv_len)
    width = heads * dim_v
    if type(out if lse is None else lse) is not Tensor:
        raise RuntimeError(
            "the native kernels were given no memory to write to: a dispatch mode (FakeTensorMode, say) makes tensors "
            'without any; use attn_implementation="adaattn_sdpa" under it'
        )
    head = CALL.pack(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), _pointer(out), _pointer(lse),
        _DTYPES[q.dtype], _DTYPES[k.dtype], _DTYPES[v.dtype],
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
        v: `[batch, num_kv_heads, kv_len, head_dim_v]`; beside int8 keys also uint8 with half the channels, two values
            of four bits to a byte.
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
    if not _plain(q, k, v):
        q, k, v = readable(q, "query"), readable(k, "key"), readable(v, "value")
        check_extents(q, k, v, _DTYPES)
    if k.dtype is torch.int8 and (rules.key_scale is None or rules.value_scale is None):
        raise ValueError("key, value: got torch.int8 without scales; set key_scale and value_scale")
    batch, heads, q_len, _ = q.shape
    dim_v = 2 * v.shape[3] if v.dtype is torch.uint8 else v.shape[3]
    out = torch.empty((batch, q_len, heads, dim_v), dtype=q.dtype) if need_out else None
    lse = torch.empty((batch, heads, q_len), dtype=torch.float32) if need_lse else None
    if not (q.numel() and k.numel() and v.numel()):
        return _nothing(out, lse, rules)
    status = native.forward(
        words(q, k, v, out, lse, scaling, rules, native.level if level is None else level)
    )
    if status:
        raise RuntimeError(_ERRORS[status])
    return out, lse


def _plain(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether three tensors can be read as they are and belong together; False asks for a closer look."""
    try:
        dtype = q.dtype
        k_shape, v_shape = k.shape, v.shape
        return bool(
            type(q) is Tensor
            and type(k) is Tensor
            and type(v) is Tensor
            and dtype in _FLOATS
            and ((dtype is k.dtype and dtype is v.dtype) or (k.dtype is torch.int8 and v.dtype in _CODES))
            and q.is_cpu
            and k.is_cpu
            and v.is_cpu
            and len(k_shape) == 4
            and k_shape[:3] == v_shape[:3]
            and q.shape[::3] == k_shape[::3]
            and not (q.is_neg() or k.is_neg() or v.is_neg())
            and q.untyped_storage().data_ptr()
            and k.untyped_storage().data_ptr()
            and v.untyped_storage().data_ptr()
            and v_shape[1] > 0
            and q.shape[1] % v_shape[1] == 0
        )
    except (RuntimeError, NotImplementedError):
        return False  # sparse tensors and the like have no storage to ask for


def _nothing(out: Tensor | None, lse: Tensor | None, rules: Rules) -> tuple[Tensor | None, Tensor | None]:
    """The answer where no query sees any key: zeros, and in the sum of each row the learned sink alone."""
    if out is not None:
        out.zero_()
    if lse is not None:
        lse.fill_(float("-inf"))
        if rules.sink_logits is not None:
            lse.copy_(rules.sink_logits[:, None].expand_as(lse))
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
    q, k, v, grad, out, lse = (
        readable(tensor, name)
        for name, tensor in zip(
            ("query", "key", "value", "grad", "out", "lse"), (q, k, v, grad, out, lse), strict=True
        )
    )
    check_extents(q, k, v, _DTYPES)
    shape = (q.shape[0], q.shape[2], q.shape[1], v.shape[3])
    check_rule("grad", grad, shape, q.dtype, "strided")
    check_rule("out", out, shape, q.dtype, "contiguous")
    check_rule("lse", lse, tuple(q.shape[:3]), torch.float32, "contiguous")
    dq = (
        torch.zeros(q.shape, dtype=q.dtype)
        if rules.segments is not None
        else torch.empty(q.shape, dtype=q.dtype)
    )
    dk, dv = torch.zeros(k.shape, dtype=k.dtype), torch.zeros(v.shape, dtype=v.dtype)
    dbias = torch.zeros((*q.shape[:3], k.shape[2]), dtype=torch.float32) if need_bias else None
    g = grad.transpose(1, 2)
    tail = BACKWARD.pack(
        g.data_ptr(), *g.stride(), dq.data_ptr(), dk.data_ptr(), dv.data_ptr(),
        *dq.stride(), *dk.stride(), *dv.stride(), _pointer(dbias), *(_NONE4 if dbias is None else dbias.stride()),
    )  # fmt: skip
    status = native.handle.ada_backward(
        words(q, k, v, out, lse, scaling, rules, native.level if level is None else level, tail)
    )
    if status:
        raise RuntimeError(_ERRORS[status])
    return Gradients(dq, dk, dv, dbias)
