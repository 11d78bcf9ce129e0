"""Rules of native calls, and tokens on their way into a cache, that do not fit: drawn by hypothesis, and judged."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from adaattn_hf.attention.stored import quantise
from adaattn_hf.backends.native import launch
from adaattn_hf.backends.native.rules import Rules
from adaattn_hf.backends.native.storing import store

from .calls import generator
from .malformed import TENSOR_CHANGES, Shown, Unreadable, freed, raised_here

CHANGES = {
    name: change for name, change in TENSOR_CHANGES.items() if name not in ("a list", "an array", "a word", "a number")
} | {"freed": freed}
BROADCAST = ("bias", "mask", "keep")
NUMBERS: dict[str, list[Any]] = {
    "offset": [1 << 62, -(1 << 62), (1 << 63) - 1, 1 << 41],
    "window": [1 << 62, (1 << 40) + 1],
    "sinks": [-1, 1 << 62],
}


@dataclass(repr=False)
class NativeCall(Shown):
    """A call of the kernels.

    Attributes:
        tensors: Query, key and value.
        rules: Its rules.
        changed: Name of the rule that was changed.
        how: What was changed, in words.
        before: The rule as it was.
    """

    tensors: tuple[Tensor, Tensor, Tensor]
    rules: Rules
    changed: str
    how: str
    before: Any

    def __repr__(self) -> str:
        value = getattr(self.rules, self.changed)
        shown = f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else value
        return f"NativeCall({[list(t.shape) for t in self.tensors]}, {self.changed} {self.how}: {shown})"


@st.composite
def native_calls(draw: st.DrawFn) -> NativeCall:
    batch, kv_heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    q_len, kv_len = draw(st.sampled_from([1, 3, 40])), draw(st.sampled_from([1, 5, 64, 70]))
    dim, heads = draw(st.sampled_from([1, 7, 32])), kv_heads * groups
    source = generator(draw(st.integers(0, 99)))
    tensors = tuple(
        torch.randn(batch, h, n, dim, generator=source)
        for h, n in ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
    )
    one = draw(st.sampled_from([1, batch]))
    known: dict[str, Tensor] = {
        "segments": torch.tensor([[b, 0, q_len, 0, kv_len, 0] for b in range(batch)]),
        "head_windows": torch.full((kv_heads,), 5),
        "head_sinks": torch.full((kv_heads,), 1),
        "sink_logits": torch.randn(heads, generator=source),
        "bias": torch.randn(one, heads, q_len, kv_len, generator=source),
        "mask": torch.rand(one, 1, q_len, kv_len, generator=source) > 0.3,
    }
    if draw(st.booleans()):
        known |= {
            "key_scale": torch.randint(60, 90, (batch, kv_heads, kv_len), dtype=torch.uint8, generator=source),
            "value_scale": torch.randint(60, 90, (batch, kv_heads, kv_len), dtype=torch.uint8, generator=source),
            "key_mean": torch.randn(batch, kv_heads, dim, generator=source),
            "first_key": torch.randn(batch, kv_heads, dim, generator=source),
        }
        tensors = (tensors[0], *((t * 40).clamp(-127, 127).to(torch.int8) for t in tensors[1:]))
    names = draw(st.lists(st.sampled_from(list(known)), min_size=1, max_size=4, unique=True))
    given = {name: value for name, value in known.items() if name in names or "scale" in name}
    rules = Rules(causal=draw(st.booleans()), **given)  # type: ignore[arg-type]
    if draw(st.integers(0, 5)) == 0:
        name = draw(st.sampled_from(list(NUMBERS)))
        number = draw(st.sampled_from(NUMBERS[name]))
        return NativeCall(tensors, replace(rules, **{name: number}), name, f"= {number}", None)
    name, how = draw(st.sampled_from(names)), draw(st.sampled_from(list(CHANGES)))
    try:
        changed = CHANGES[how](given[name])
    except (RuntimeError, IndexError):
        changed, how = given[name], "unchanged"
    return NativeCall(tensors, replace(rules, **{name: changed}), name, how, given[name])


def judge_native(asked: NativeCall) -> str:
    """The verdict: `refused` in words, or `served` as the same numbers laid out plainly are.

    Raises:
        AssertionError: The rule does not fit the call and was followed, or the error is nobody's.
    """
    told = repr(asked)
    try:
        out, lse = launch.forward(*asked.tensors, 0.3, asked.rules, need_lse=True)
    except Exception as error:  # which one is what is judged
        if raised_here(error):
            return "refused"
        raise AssertionError(f"{told}: {error!r}") from error
    assert asked.before is not None, f"{told}: served beyond reason"
    changed = getattr(asked.rules, asked.changed)
    try:
        plain = _laid_out(changed, asked.before, asked.changed)
    except (Unreadable, RuntimeError) as error:
        raise AssertionError(f"{told}: served though it does not fit") from error
    again = launch.forward(*asked.tensors, 0.3, replace(asked.rules, **{asked.changed: plain}), need_lse=True)
    for ours, theirs in zip((out, lse), again, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True, msg=told)
    return "served"


def _laid_out(changed: Tensor, before: Tensor, name: str) -> Tensor:
    floats = changed.is_floating_point() and changed.dtype is not torch.float64
    if changed.dtype is not before.dtype and not (name == "bias" and floats):
        raise Unreadable
    if name in BROADCAST:
        extents = [max(a, b) for a, b in zip(changed.shape, before.shape, strict=True)]
        return changed.expand(extents).clone() if name != "keep" else changed.clone()
    if name == "segments" and changed.dim() == 2 and changed.shape[1] == 6:
        return changed.clone()  # fewer rows, or the same again, are segments, too
    if name == "key_mean" and changed.shape[1:] == before.shape[1:] and changed.shape[0] == 1:
        return changed.clone()  # one mean for all
    if changed.shape != before.shape:
        raise Unreadable
    return changed.clone()


@dataclass(repr=False)
class Stored(Shown):
    """Tokens and where their codes belong: `x`, `codes`, `scale`, `mean`; and what was changed."""

    parts: dict[str, Any]
    how: str

    def __repr__(self) -> str:
        shown = {n: f"{t.dtype}{list(t.shape)}" for n, t in self.parts.items() if isinstance(t, Tensor)}
        return f"Stored({shown}, {self.how})"


@st.composite
def stored_calls(draw: st.DrawFn) -> Stored:
    bits = draw(st.sampled_from([8, 4]))
    batch, heads, n = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 9))
    dim = 32 if bits == 4 else draw(st.sampled_from([1, 7, 32]))
    source = generator(draw(st.integers(0, 99)))
    width, dtype = (dim // 2, torch.uint8) if bits == 4 else (dim, torch.int8)
    parts: dict[str, Any] = {
        "x": torch.randn(batch, heads, n, dim, generator=source),
        "codes": torch.zeros(batch, heads, n, width, dtype=dtype),
        "scale": torch.zeros(batch, heads, n, dtype=torch.uint8),
        "mean": torch.randn(batch, heads, dim, generator=source),
    }
    name, how = draw(st.sampled_from(list(parts))), draw(st.sampled_from(list(CHANGES)))
    try:
        parts[name] = CHANGES[how](parts[name])
    except (RuntimeError, IndexError):
        how = "unchanged"
    return Stored(parts, f"{name} {how}")


def judge_stored(asked: Stored) -> str:
    """The verdict: `refused` in words, or `served`: codes are those of the definition.

    Raises:
        AssertionError: The codes are others, or the error is nobody's.
    """
    x, codes, scale, mean = (asked.parts[name] for name in ("x", "codes", "scale", "mean"))
    try:
        store(x, codes, scale, mean=mean)
    except Exception as error:  # which one is what is judged
        if raised_here(error):
            return "refused"
        raise AssertionError(f"{asked}: {error!r}") from error
    try:
        made, scales = quantise(x, bits=4 if codes.dtype is torch.uint8 else 8, mean=mean)
    except (RuntimeError, IndexError, TypeError) as error:
        raise AssertionError(f"{asked}: served though it means nothing") from error
    count = x.shape[2]
    untouched = asked.how.startswith("codes") or not codes[:, :, count:].any()
    assert untouched, f"{asked}: wrote behind the tokens"
    codes, scale = codes[:, :, :count], scale[:, :, :count]
    assert made.shape == codes.shape, f"{asked}: served though it does not fit"
    overlapping = "repeated" in asked.how and not asked.how.startswith(("x", "mean"))
    finite = torch.isfinite(x).all() and torch.isfinite(mean).all()
    if finite and float(x.abs().amax() if x.numel() else 0) < 1e3 and not overlapping:
        near = (scales == scale).float().mean() if scale.numel() else 1.0
        assert near > 0.95, f"{asked}: other scales"
        if codes.dtype is torch.int8 and codes.numel():
            differ = (made.int() - codes.int()).abs()[scales == scale]
            assert int(differ.amax()) <= 1, f"{asked}: other codes"
    return "served"
