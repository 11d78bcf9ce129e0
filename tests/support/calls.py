"""Attention calls of every shape, drawn by hypothesis, and the tolerance that a backend has."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from adaattn_hf.attention import reference
from adaattn_hf.attention.call import AttentionCall, AttentionResult
from adaattn_hf.attention.kind import EMPTY, CallKind
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends.base import Backend, zero_output
from adaattn_hf.backends.eager import EagerBackend
from adaattn_hf.backends.native.backend import NativeBackend
from adaattn_hf.backends.sdpa import SdpaBackend
from adaattn_hf.backends.select import BACKENDS

DEFAULTS = (torch.float32, torch.bfloat16)
"""What users set torch's default dtype to."""
HALF = (torch.bfloat16, torch.float16)
ON_CPU: dict[str, Backend] = {"sdpa": SdpaBackend(), "eager": EagerBackend(), "native": NativeBackend()}
"""Backends for this machine's processor; `native` lacks its library where there was no compiler."""


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Torch's default while a block runs; it must change nothing of what is computed from tensors."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@st.composite
def structures(draw: st.DrawFn, batch: int, q_len: int, kv_len: int) -> MaskStructure:
    """Any conjunction of rules over `q_len` queries and `kv_len` keys."""
    rules: dict[str, Any] = {"causal": draw(st.booleans())}
    # queries at the end of the keys as in generation, before the first key, or behind the last one
    rules["q_offset"] = draw(st.sampled_from([kv_len - q_len, 0, -1, 2]))
    square = q_len == kv_len
    if draw(st.booleans()):
        rules["window"] = draw(st.integers(1, kv_len + 1))
        rules["sinks"] = draw(st.integers(0, 3))
    kind = draw(st.sampled_from(["none", "none", "padding", "documents", "chunks", "spans", "mask", "offset"]))
    if kind == "padding":
        padding = torch.rand(batch, kv_len, generator=generator(draw(st.integers(0, 99)))) > 0.4
        if draw(st.booleans()):  # without holes
            padding = padding.sort(dim=1, descending=draw(st.booleans())).values
        rules["key_padding"] = padding
    elif kind == "documents" and square:
        rules["q_offset"] = 0
        edges = torch.rand(1, kv_len, generator=generator(draw(st.integers(0, 99)))) > 0.7
        rules["k_segments"] = rules["q_segments"] = edges.long().cumsum(1).expand(draw(st.sampled_from([1, batch])), -1)
        if draw(st.booleans()):  # said by row of queries and once of keys, or the other way about
            rules["q_segments"] = edges.long().cumsum(1).expand(draw(st.sampled_from([1, batch])), -1)
        if draw(st.booleans()):  # in chunks, and cut short by padding on the left
            rules["chunk"] = draw(st.integers(1, kv_len))
            left = torch.arange(kv_len) >= draw(st.integers(0, kv_len))
            rules["key_padding"] = left.expand(batch, -1)
    elif kind == "chunks":
        rules["chunk"] = draw(st.integers(1, kv_len))
        starts = st.lists(st.integers(0, kv_len), min_size=batch, max_size=batch)
        rules["chunk_start"] = torch.tensor(draw(starts))
    elif kind == "spans":
        rules["spans"] = torch.randint(-1, 2, (batch, kv_len), generator=generator(draw(st.integers(0, 99))))
    elif kind == "mask":
        shape = (draw(st.sampled_from([1, batch])), 1, draw(st.sampled_from([1, q_len])), kv_len)
        rules["mask"] = torch.rand(shape, generator=generator(draw(st.integers(0, 99)))) > 0.4
    elif kind == "offset":
        rules["q_offset"] = torch.tensor(rules["q_offset"])
    return MaskStructure(batch, q_len, kv_len, **rules)


@st.composite
def calls(draw: st.DrawFn, dtype: torch.dtype = torch.float32, longest: int = 40, extras: bool = True) -> AttentionCall:
    """A call: odd lengths and head sizes, grouped heads, strided inputs, huge logits, learned sinks, softcap, bias."""
    batch = draw(st.integers(1, 3))
    kv_heads, groups = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 1, 2, 3]))
    kv_len = draw(st.sampled_from([1, 2, 3, 7, 16, 17, 31, longest]))
    q_len = draw(st.sampled_from([1, kv_len, kv_len, max(1, kv_len // 2), max(1, kv_len - 1)]))
    head_dim = draw(st.sampled_from([1, 3, 8, 16, 20, 64]))
    head_dim_v = draw(st.sampled_from([head_dim, head_dim, 5, 12]))
    random = generator(draw(st.integers(0, 999)))

    def tensor(heads: int, length: int, size: int) -> Tensor:
        drawn = torch.randn(batch, length, heads, size, generator=random).to(dtype)
        # as Transformers hands them over, or laid out plainly
        return drawn.transpose(1, 2) if strided else drawn.transpose(1, 2).contiguous()

    strided = draw(st.booleans())
    query = tensor(kv_heads * groups, q_len, head_dim)
    key, value = tensor(kv_heads, kv_len, head_dim), tensor(kv_heads, kv_len, head_dim_v)
    if draw(st.integers(0, 4)) == 0 and dtype not in HALF:
        query = query * 300  # scores beyond what an exponential without a maximum bears
    more: dict[str, Any] = {}
    if extras and draw(st.integers(0, 2)) == 0:
        more["softcap"] = draw(st.sampled_from([2.0, 30.0]))
    if extras and draw(st.integers(0, 2)) == 0:
        more["sink_logits"] = torch.randn(kv_heads * groups, generator=random)
    if extras and draw(st.integers(0, 2)) == 0:
        shape = (draw(st.sampled_from([1, batch])), kv_heads * groups, draw(st.sampled_from([1, q_len])), kv_len)
        more["bias"] = torch.randn(shape, generator=random)
    if extras and draw(st.integers(0, 2)) == 0:
        more["need_lse"] = True
    structure = draw(structures(batch, q_len, kv_len))
    return AttentionCall(query, key, value, structure, draw(st.sampled_from([head_dim**-0.5, 1.0])), **more)


def attended(backend: str | Backend, call: AttentionCall) -> AttentionResult:
    """What a backend computes, whether it would refuse the call or not."""
    kind = call.checked_kind(named=True)
    if kind.features & EMPTY:
        return zero_output(call)
    serves = BACKENDS[backend] if isinstance(backend, str) else backend
    return serves.kernel(kind, call.per_head)(call)


def call_over(
    structure: MaskStructure, dim: int, heads: int = 4, dtype: torch.dtype = torch.float32, scaling: float = 0.3,
    **more: Any,
) -> AttentionCall:  # fmt: skip
    """A call of a structure over drawn tensors of two key/value heads, which lie behind tokens as models leave them."""
    shapes = (structure.q_len, heads), (structure.kv_len, 2), (structure.kv_len, 2)
    drawn = (torch.randn(structure.batch, *shape, dim, generator=generator(at)) for at, shape in enumerate(shapes))
    query, key, value = (tensor.to(dtype).transpose(1, 2) for tensor in drawn)
    return AttentionCall(query, key, value, structure, scaling, **more)


def kind_with(*bits: int, device: str = "cpu", shape: str = "full", groups: int = 1, **changes: Any) -> CallKind:
    """The kind of a small float32 call with these features."""
    x = torch.zeros(1, 2, 3, 4)
    plain = AttentionCall(x, x, x, MaskStructure(1, 3, 3), scaling=1.0).checked_kind()
    asked: dict[str, Any] = {"device": torch.device(device), "shape": shape, "features": sum(set(bits)), **changes}
    return plain._replace(heads=plain.kv_heads * groups, **asked)


def words_of(call: AttentionCall) -> str:
    r = call
    shapes = [tuple(t.shape) for t in (r.query, r.key, r.value)]
    more = f"{r.softcap}, sinks {r.sink_logits is not None}, bias {r.bias is not None}"
    return f"{r.query.dtype}, {shapes}, {r.structure}, {more}"


def refuses(name: str, call: AttentionCall) -> bool:
    backend = ON_CPU[name]
    return bool(backend.missing() or backend.refusals(call.checked_kind()))


def bound(call: AttentionCall, truth: Tensor) -> float:
    """Largest error that a backend may have: twice that of the same mathematics in its dtype, and one rounding.

    The reference is evaluated in the call's dtype (at least fp32, its result rounded), which is what reordering the
    same operations costs; both errors are against double precision.
    """
    dtype = call.value.dtype
    low = reference.attention(call, torch.promote_types(dtype, torch.float32)).out.to(dtype)
    band = torch.finfo(dtype).eps * max(1.0, float(truth.abs().amax()))
    scores = float(call.query.abs().amax() * call.key.abs().amax()) * abs(call.scaling)
    # a score of size s is known to s * eps, and its weight as well
    spread: float = 4 + scores * call.query.shape[3] ** 0.5
    return 2 * float((low.double() - truth).abs().amax()) + band * spread


def leaves(call: AttentionCall) -> tuple[AttentionCall, list[Tensor]]:
    """The call over tensors that collect gradients, and these tensors."""
    found: dict[str, Tensor] = {}
    for name in ("query", "key", "value", "sink_logits", "bias"):
        tensor = getattr(call, name)
        if tensor is not None:
            found[name] = tensor.detach().clone().requires_grad_()
    changed: dict[str, Any] = dict(found)
    return replace(call, structure=call.structure.with_changes(), **changed), list(found.values())


def assert_right(call: AttentionCall, out: Tensor) -> None:
    """An output is as near to the reference's as `bound` asks."""
    truth = reference.attention(call).out
    error, limit = float((out.double() - truth).abs().amax()), bound(call, truth)
    assert error <= limit, f"off by {error:.2e}, allowed {limit:.2e}"


def assert_right_gradients(call: AttentionCall, attend: Callable[[AttentionCall], Tensor]) -> None:
    """The gradients of every tensor of a call, in a drawn direction, are those of the reference."""
    ours, tensors = leaves(call)
    theirs, copies = leaves(call)
    truth = reference.attention(theirs).out
    weight = torch.randn(truth.shape, generator=generator(5))
    found, exact = (
        torch.autograd.grad((out * weight).sum(), given, allow_unused=True, materialize_grads=True)
        for out, given in ((attend(ours), tensors), (truth, copies))
    )
    scores = float(call.query.abs().amax() * call.key.abs().amax()) * abs(call.scaling)
    for tensor, mine, right in zip(tensors, found, exact, strict=True):
        assert torch.isfinite(mine).all()
        scale = max(1.0, float(right.abs().amax()), float(tensor.detach().abs().amax()))
        error, limit = float((mine - right).abs().amax()), 3e-6 * scale * (10 + scores)
        assert error <= limit, f"a gradient off by {error:.2e}, allowed {limit:.2e}"


def gradchecked(attend: Callable[[AttentionCall], Tensor], structure: MaskStructure, extra: str) -> bool:
    """Whether finite differences give the gradients of a call in double precision: plain, or with one `extra`."""

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    batch, q_len, kv_len = structure.batch, structure.q_len, structure.kv_len
    inputs = [drawn(batch, heads, length, 3) for heads, length in ((4, q_len), (2, kv_len), (2, kv_len))]
    name, shape = {"sinks": ("sink_logits", (4,)), "bias": ("bias", (1, 4, q_len, kv_len))}.get(extra, ("", ()))
    inputs += [drawn(*shape)] if name else []

    def run(*tensors: Tensor) -> Tensor:
        more: dict[str, Any] = {"softcap": 3.0} if extra == "softcap" else {name: tensors[3]} if name else {}
        return attend(AttentionCall(*tensors[:3], structure, 0.6, **more))

    return torch.autograd.gradcheck(run, inputs, fast_mode=True)
