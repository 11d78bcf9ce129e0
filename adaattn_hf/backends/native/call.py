"""One call of the C library: tensors and rules become the words of its argument structure."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..base import FastCall
from .guard import Form, check_extents, check_rule, readable
from .library import BACKWARD, CALL, RULES, library, missing

__all__ = ["NO_RULES", "Gradients", "Rules", "backward", "forward", "forward_like"]

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3, torch.uint8: 4}
_SCALES = {torch.float32: 0, torch.uint8: 5}
COMPUTE = {"model": 0, "bf16": 1, "int8": 2}
_FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float16))
_CODES = frozenset((torch.int8, torch.uint8))
_OFFSETS = 1 << 40
"""An address up to which it may be but the offset of a view into a storage that was freed: that one begins at 0."""
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
_COVERS: dict[str, tuple[str, torch.dtype | None, Form]] = {
    "segments": ("n6", torch.int64, "contiguous"),
    "head_windows": ("g", torch.int64, "contiguous"),
    "head_sinks": ("g", torch.int64, "contiguous"),
    "sink_logits": ("h", torch.float32, "contiguous"),
    "bias": ("bhqk", None, "broadcast"),
    "mask": ("bhqk", torch.bool, "broadcast"),
    "key_scale": ("bgk", torch.float32, "strided"),
    "value_scale": ("bgk", torch.float32, "strided"),
    "keep": ("bgqn", torch.bool, "broadcast"),
    "key_mean": ("bgd", torch.float32, "contiguous"),
    "first_key": ("bgd", torch.float32, "contiguous"),
}
"""Of each rule in a tensor its extents (batch, heads, key/value heads g, queries, keys, size d, any number n), dtype
and form."""


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
    def _tensors(self) -> tuple[str, ...]:
        """Names of the rules that lie in tensors, whose extents the call must have."""
        return tuple([name for name, value in self.__dict__.items() if isinstance(value, Tensor)])

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
        sizes = {"b": batch, "h": heads, "q": q_len, "d": dim, "g": kv_heads, "k": kv_len, "n": -1, "6": 6}
        for name in self._tensors:
            tensor: Tensor = getattr(self, name)
            extents, dtype, form = _COVERS[name]
            if name.endswith("_scale") and self.key_scale is not None and self.key_scale.dtype is torch.uint8:
                dtype = torch.uint8
            asked = [sizes[letter] for letter in extents]
            if name == "key_mean" and tensor.shape[:1] == (1,):
                asked[0] = 1
            check_rule(name, tensor, asked, dtype, form)
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


def _pointers(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, int]:
    return q.data_ptr(), k.data_ptr(), v.data_ptr()


def _broadcast(t: Tensor) -> tuple[int, ...]:
    """Strides of `t`, 0 along the extents that it repeats."""
    return tuple(0 if size == 1 else step for size, step in zip(t.shape, t.stride(), strict=True))


NO_RULES = Rules()


def extents_of(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    """What the library is told of shapes and dtypes: those of query, key and value, batch, heads, lengths, sizes."""
    batch, heads, q_len, dim = q.shape
    _, kv_heads, kv_len, dim_v = v.shape
    if v.dtype is torch.uint8:
        dim_v *= 2
    dtypes = _DTYPES[q.dtype], _DTYPES[k.dtype], _DTYPES[v.dtype]
    return *dtypes, batch, heads, kv_heads, q_len, kv_len, dim, dim_v


def arguments(
    addresses: tuple[int, int, int],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    extents: tuple[int, ...],
    scaling: float,
    level: int,
    tail: bytes,
) -> bytes:
    """The argument structure of a call; every tensor in it must outlive the call.

    Args:
        addresses: Of query, key and value.
        q, k, v: Plain tensors that the rules in `tail` were checked for.
        out: Contiguous `[batch, q_len, heads, head_dim_v]`, None where it is not computed.
        lse: Contiguous `[batch, heads, q_len]`, None where it is not computed.
        extents: Of the tensors, as `extents_of` says.
        scaling: Factor on the scores.
        level: Number of an instruction set.
        tail: The packed rules, and what the backward adds.
    """
    if type(out if lse is None else lse) is not Tensor:
        raise RuntimeError(
            "the native kernels were given no memory to write to: a dispatch mode (FakeTensorMode, say) makes tensors "
            'without any; use attn_implementation="adaattn_sdpa" under it'
        )
    dim_v = extents[9]
    width = extents[4] * dim_v
    return (
        CALL.pack(
            *addresses, 0 if out is None else out.data_ptr(), 0 if lse is None else lse.data_ptr(), *extents,
            *q.stride(), *k.stride(), *v.stride(), extents[6] * width, dim_v, width, 1,
            scaling, torch.get_num_threads(), level,
        )
        + tail
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
    q, k, v = _checked(q, k, v)
    if k.dtype is torch.int8 and (rules.key_scale is None or rules.value_scale is None):
        raise ValueError("key, value: got torch.int8 without scales; set key_scale and value_scale")
    extents = extents_of(q, k, v)
    _, _, _, batch, heads, kv_heads, q_len, kv_len, dim, dim_v = extents
    out = q.new_empty(batch, q_len, heads, dim_v) if need_out else None
    lse = q.new_empty(batch, heads, q_len, dtype=torch.float32) if need_lse else None
    if 0 in extents[3:]:
        return _nothing(out, lse, rules)
    rules.check(batch, heads, q_len, dim, kv_heads, kv_len)
    status = native.forward(
        arguments(
            _pointers(q, k, v), q, k, v, out, lse, extents, scaling, native.level if level is None else level,
            rules.packed + _FORWARD_TAIL,
        )
    )  # fmt: skip
    if status:
        raise RuntimeError(_ERRORS[status])
    return out, lse


def forward_like(q: Tensor, k: Tensor, v: Tensor, rules: Rules) -> FastCall | None:
    """`forward` without the log-sum-exp for calls with the shapes and dtypes of these tensors; None for empty ones.

    A small call costs as much here as in the library. So what depends on neither memory nor strides is worked out once,
    and a call asks no more than whether it may read what it is given.
    """
    native = library()
    extents = extents_of(q, k, v)
    _, _, _, batch, heads, kv_heads, q_len, kv_len, dim, dim_v = extents
    if native is None or 0 in extents[3:]:
        return None
    _checked(q, k, v)
    rules.check(batch, heads, q_len, dim, kv_heads, kv_len)
    run, level, tail = native.forward, native.level, rules.packed + _FORWARD_TAIL

    def attend(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        addresses = _addresses(query, key, value)
        if addresses is None:
            out, _ = forward(query, key, value, scaling, rules)
            assert out is not None  # it is asked for
            return out
        out = query.new_empty(batch, q_len, heads, dim_v)
        status = run(arguments(addresses, query, key, value, out, None, extents, scaling, level, tail))
        if status:
            raise RuntimeError(_ERRORS[status])
        return out

    return attend


def _checked(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value with their numbers in memory.

    Raises:
        ValueError: They cannot be read, or do not belong together.
    """
    if not _plain(q, k, v):
        q, k, v = readable(q, "query"), readable(k, "key"), readable(v, "value")
        check_extents(q, k, v, _DTYPES)
    return q, k, v


def _addresses(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, int] | None:
    """Where three tensors lie, if they can be read as they are; None asks for a closer look."""
    try:
        if type(q) is type(k) is type(v) is Tensor and q.is_cpu and k.is_cpu and v.is_cpu:
            at = q_at, k_at, v_at = q.data_ptr(), k.data_ptr(), v.data_ptr()
            if q_at > _OFFSETS and k_at > _OFFSETS and v_at > _OFFSETS:
                return None if q.is_neg() or k.is_neg() or v.is_neg() else at
    except (RuntimeError, NotImplementedError):
        pass  # sparse tensors and the like have no storage to ask for
    return None


def _plain(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether three tensors can be read as they are and belong together; False asks for a closer look."""
    if _addresses(q, k, v) is None or not q.dim() == k.dim() == v.dim() == 4:
        return False
    batch, heads, _, dim = q.shape
    k_batch, kv_heads, kv_len, k_dim = k.shape
    v_batch, v_heads, v_len, _ = v.shape
    dtype = q.dtype
    return (
        dtype in _FLOATS
        and ((dtype is k.dtype and dtype is v.dtype) or (k.dtype is torch.int8 and v.dtype in _CODES))
        and batch == k_batch == v_batch
        and kv_heads == v_heads
        and kv_len == v_len
        and dim == k_dim
        and heads % kv_heads == 0
    )


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
    extents = extents_of(q, k, v)
    _, _, _, batch, heads, kv_heads, q_len, kv_len, dim, _ = extents
    rules.check(batch, heads, q_len, dim, kv_heads, kv_len)
    status = native.handle.ada_backward(
        arguments(
            _pointers(q, k, v),
            q,
            k,
            v,
            out,
            lse,
            extents,
            scaling,
            native.level if level is None else level,
            rules.packed + tail,
        )
    )
    if status:
        raise RuntimeError(_ERRORS[status])
    return Gradients(dq, dk, dv, dbias)
