"""Attention calls that no caller should make, drawn by hypothesis, and the judgement of what comes of them."""

import linecache
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from adaattn_hf.patches.mask.structured_mask import StructuredMask

from .calls import DEFAULTS, calls, default_dtype, generator
from .doors import door

NONE, MOST = float("nan"), float("inf")
Change = Callable[[Tensor], Any]


class Unreadable(Exception):
    """A call means nothing: no formula applies to its extents or types."""


class Layer(nn.Module):
    """What the attention function reads of a module."""

    is_causal = True
    config = None

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = groups


class Shown:
    """What hypothesis prints by its own words: numbers may lie in no memory."""

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


@dataclass(repr=False)
class Call(Shown):
    """What an attention function is called with."""

    backend: str | None  # name of the implementation behind the name, None for a choice
    given: dict[str, Any]  # query, key, value, attention_mask and keywords
    changes: list[str] = field(default_factory=list)  # what was made of a valid call, in words
    default: torch.dtype = torch.float32  # torch's default

    def __repr__(self) -> str:
        shown = {n: f"{v.dtype}{list(v.shape)}" if isinstance(v, Tensor) else v for n, v in self.given.items()}
        return f"Call({self.backend}, {shown}, {self.changes}, default {self.default})"


def freed(tensor: Tensor) -> Tensor:
    copy = tensor + 0
    copy.untyped_storage().resize_(0)
    return copy


def spotted(tensor: Tensor, number: float) -> Tensor:
    copy = tensor.clone().contiguous()
    if copy.numel() and copy.is_floating_point():
        copy.view(-1)[copy.numel() // 2] = number
    return copy


TENSOR_CHANGES: dict[str, Change] = {
    "of one dimension less": lambda t: t[0] if t.dim() and t.shape[0] else t.sum(),
    "of one dimension more": lambda t: t[None], "turned around": lambda t: t.permute(*reversed(range(t.dim()))),
    "of one number": lambda t: t.sum(), "in float64": lambda t: t.double(), "in float16": lambda t: t.half(),
    "in bfloat16": lambda t: t.bfloat16(), "in int64": lambda t: t.long(), "in bool": lambda t: t.bool(),
    "in complex64": lambda t: t.to(torch.complex64), "sparse": lambda t: t.to_sparse(),
    "on meta": lambda t: t.to("meta"), "negated lazily": lambda t: torch.complex(torch.zeros_like(t), t).conj().imag,
    "all zero": lambda t: torch._efficientzerotensor(t.shape),
    "a parameter": lambda t: nn.Parameter(t, requires_grad=False), "a list": lambda t: t.tolist(),
    "an array": lambda t: t.numpy(), "a word": lambda t: "adaattn", "a number": lambda t: 3,
    "with a NaN": lambda t: spotted(t, NONE), "with an infinity": lambda t: spotted(t, MOST),
    "with a huge number": lambda t: spotted(t, 1e30),
}  # fmt: skip
for _d in range(4):
    TENSOR_CHANGES |= {
        f"longer along {_d}": lambda t, d=_d: torch.cat([t, t.narrow(d, 0, 1)], d),  # type: ignore[misc]
        f"shorter along {_d}": lambda t, d=_d: t.narrow(d, 0, t.shape[d] - 1),  # type: ignore[misc]
        f"empty along {_d}": lambda t, d=_d: t.narrow(d, 0, 0),  # type: ignore[misc]
        f"single along {_d}": lambda t, d=_d: t.narrow(d, 0, 1),  # type: ignore[misc]
        f"repeated along {_d}": lambda t, d=_d: t.narrow(d, 0, 1).expand(t.shape),  # type: ignore[misc]
        f"doubled along {_d}": lambda t, d=_d: torch.cat([t, t], d),  # type: ignore[misc]
        f"every other along {_d}": lambda t, d=_d: torch.stack([t, -t], d + 1).flatten(d, d + 1)[  # type: ignore[misc]
            (slice(None),) * d + (slice(None, None, 2),)
        ],
        f"backwards along {_d}": lambda t, d=_d: t.flip(d),  # type: ignore[misc]
    }
NUMBERS: dict[str, list[Any]] = {
    "scaling": [0.0, -1.0, NONE, MOST, 1e30, "half", [1.0]], "softcap": [-2.0, NONE, MOST, 1e-30, "much"],
    "dropout": [-0.5, 1.5, NONE], "is_causal": [False, True],
}  # fmt: skip


@st.composite
def malformed(draw: st.DrawFn, doors: tuple[str | None, ...] = (None, None, "native", "sdpa", "eager")) -> Call:
    """A valid call after one or two changes, most of which it does not survive."""
    valid = draw(calls(longest=70))
    structure = valid.structure
    kind = draw(st.sampled_from(["none", "none", "bool", "float", "columns", "structure"]))
    mask: Any = None
    if kind in ("bool", "float"):
        heads = draw(st.sampled_from([1, valid.query.shape[1]]))
        mask = structure.visible().expand(structure.batch, heads, structure.q_len, structure.kv_len)
        mask = torch.where(mask, 0.0, -MOST) if kind == "float" else mask.clone()
    elif kind == "columns":
        mask = torch.rand(structure.batch, structure.kv_len, generator=generator(7)) > 0.3
    elif kind == "structure":
        mask = StructuredMask(structure, torch.device("cpu"))
    given = {"query": valid.query, "key": valid.key, "value": valid.value, "attention_mask": mask}
    more = {"scaling": valid.scaling, "softcap": valid.softcap, "s_aux": valid.sink_logits, "position_bias": valid.bias}
    given |= {name: value for name, value in more.items() if value is not None}
    call = Call(draw(st.sampled_from(doors)), given, default=draw(st.sampled_from(DEFAULTS)))
    for _ in range(draw(st.integers(1, 2))):
        tensors = [name for name, value in given.items() if isinstance(value, Tensor)]
        name = draw(st.sampled_from([*tensors, *tensors, *NUMBERS]))
        if name in NUMBERS:
            given[name] = draw(st.sampled_from(NUMBERS[name]))
            if given[name] in (0.0, -1.0) and name == "scaling" and call.backend == "sdpa":
                given[name] = 0.5  # torch's own kernels multiply what they hide by it
            call.changes.append(f"{name} = {given[name]!r}")
            continue
        change = draw(st.sampled_from(list(TENSOR_CHANGES)))
        if change == "all zero" and call.backend != "native":
            continue  # torch's own kernels read memory that such a tensor does not have
        try:
            given[name] = TENSOR_CHANGES[change](given[name])
        except (RuntimeError, IndexError, TypeError):
            continue  # the tensor has no such dimension, or cannot become that
        call.changes.append(f"{name} {change}")
    if call.backend == "native" and draw(st.integers(0, 19)) == 0:  # torch's own operations crash on it
        name = draw(st.sampled_from(["query", "key", "value"]))
        alike = {getattr(given[part], "dtype", None) for part in ("query", "key", "value")}
        if type(given[name]) is Tensor and given[name].layout == torch.strided and len(alike) == 1:
            given[name] = freed(given[name])
            call.changes.append(f"{name} freed")
    return call


def meaning(call: Call) -> tuple[Tensor, Tensor]:
    """Attention as the formula has it, in double precision, and which of its rows must not be finite."""
    given = call.given
    parts = [given[name] for name in ("query", "key", "value")]
    if not all(isinstance(t, Tensor) and t.dim() == 4 and t.is_floating_point() for t in parts):
        raise Unreadable
    q, k, v = (t.detach().double() for t in parts)
    batch = max(t.shape[0] for t in (q, k, v)) if all(t.shape[0] for t in (q, k, v)) else 0
    if any(t.shape[0] not in (1, batch) for t in (q, k, v)) or not k.shape[1] or q.shape[1] % k.shape[1]:
        raise Unreadable
    q, k, v = (t.expand(batch, -1, -1, -1) for t in (q, k, v))
    if k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3] or not q.shape[3]:
        raise Unreadable
    (_, heads, q_len, _), kv_len = q.shape, k.shape[2]
    shape, groups = (batch, heads, q_len, kv_len), heads // k.shape[1]
    k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
    scores = q @ k.transpose(2, 3) * given["scaling"]
    cap = given.get("softcap")
    if cap is not None:
        if not 0 < cap < MOST:
            raise Unreadable
        scores = cap * torch.tanh(scores / cap)
    mask, seen = given["attention_mask"], torch.ones(shape, dtype=torch.bool)
    causal = q_len > 1 and given.get("is_causal") in (None, True)
    if isinstance(mask, StructuredMask):
        if (mask.structure.q_len, mask.structure.kv_len) != (q_len, kv_len):
            raise Unreadable
        seen = mask.structure.visible().expand(shape) if mask.structure.batch in (1, batch) else seen
    elif mask is None:
        if causal:
            seen = seen.tril()
    elif not isinstance(mask, Tensor) or mask.is_complex() or mask.layout != torch.strided:
        raise Unreadable
    elif mask.dim() == 2:
        if mask.shape[0] not in (1, batch) or mask.shape[1] < kv_len:
            raise Unreadable
        seen = mask.bool()[:, mask.shape[1] - kv_len :][:, None, None].expand(shape)
        if causal:  # as in flash-attn, the last query stands at the last key
            seen = seen.tril(kv_len - q_len)
    else:
        if mask.dim() != 4 or any(a not in (1, b) for a, b in zip(mask.shape, shape, strict=True)):
            raise Unreadable
        if mask.is_floating_point():
            scores = scores + mask.double()
        elif mask.dtype is torch.bool:
            seen = mask.expand(shape)
        else:
            raise Unreadable
    bias = given.get("position_bias")
    if bias is not None:
        if not isinstance(bias, Tensor) or not 1 < bias.dim() <= 4 or not bias.is_floating_point():
            raise Unreadable
        bias = bias[..., :q_len, :kv_len]
        if torch.broadcast_shapes(bias.shape, shape) != shape:
            raise Unreadable
        scores = scores + bias.detach().double()
    scores = scores.masked_fill(~seen, -MOST)
    sinks = given.get("s_aux")
    columns = scores
    if sinks is not None:
        if not isinstance(sinks, Tensor) or sinks.shape != (heads,) or not sinks.is_floating_point():
            raise Unreadable
        columns = torch.cat([scores, sinks.detach().double().view(1, -1, 1, 1).expand(*shape[:3], 1)], 3)
    if not columns.shape[3]:
        columns = torch.full((*shape[:3], 1), -MOST)
    weights = torch.softmax(columns, 3)[..., :kv_len]
    blind = (scores == -MOST).all(3)  # zeros, as the reference has them
    weights = torch.where(blind[..., None], torch.zeros_like(weights), weights)
    out = weights.nan_to_num(0) @ v.nan_to_num(0, 0, 0)
    bad = ~torch.isfinite(weights).all(3) | ((weights > 0).double() @ (~torch.isfinite(v)).double() > 0).any(3)
    return out.transpose(1, 2), bad.transpose(1, 2)


def raised_here(error: BaseException) -> bool:
    """Whether an error comes from a `raise` of the package, and not out of an operation that it left to itself."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(last.filename, last.lineno or 0).strip()
    return line.startswith("raise") and "site-packages/torch" not in last.filename


def refused(error: Exception, kind: type[Exception] = Exception) -> str:
    """The verdict on an error: `refused` in words of the package, of some kind; any other one fails."""
    if isinstance(error, kind) and raised_here(error):
        return "refused"
    raise AssertionError(f"{type(error).__name__}: {error!s:.900}") from error


def asked(call: Call, backend: str | None) -> Tensor:
    given = dict(call.given)
    query, key, value, mask = (given.pop(name) for name in ("query", "key", "value", "attention_mask"))
    with torch.no_grad(), default_dtype(call.default):
        out: Tensor = door(backend)(Layer(1), query, key, value, mask, **given)[0]
    return out


def stock(call: Call) -> Tensor | None:
    """What Transformers' own `sdpa` answers, None where it refuses."""
    given = dict(call.given)
    query, key, value, mask = (given.pop(name) for name in ("query", "key", "value", "attention_mask"))
    if "freed" in " ".join(call.changes):
        return None  # it reads what is not there
    try:
        with torch.no_grad():
            groups = query.shape[1] // key.shape[1]
            out: Tensor = sdpa_attention_forward(Layer(groups), query, key, value, mask, **given)[0]
    except Exception:  # any refusal is one
        return None
    return out


def judge(call: Call) -> str:
    """`refused` by the package in words, `refused as by stock` in torch's own, or `served`, as the formula has it.

    Fails where the call was answered though it means nothing, wrongly, or with an error that is nobody's.
    """
    told = f"{call.backend}: {', '.join(call.changes)}"
    try:
        out = asked(call, call.backend)
    except Exception as error:  # which one is what is judged
        if raised_here(error):
            return "refused"
        if stock(call) is not None:
            raise AssertionError(f"{told}: stock answers, here {error!r}") from error
        return "refused as by stock"
    dropout = call.given.get("dropout", 0.0)
    if any(isinstance(value, Tensor) and value.is_meta for value in call.given.values()):
        assert out.is_meta, f"{told}: numbers came of a tensor without numbers"
    if out.is_meta or (dropout and 0 <= dropout <= 1):
        return "served"
    assert dropout == 0, f"{told}: served with a dropout that is none"
    sinks = call.given.get("s_aux")
    if not out.numel() or (sinks is not None and torch.isinf(sinks).any()):
        return "served"  # a sink of all weight leaves nothing, or not-a-numbers
    try:
        truth, bad = meaning(call)
    except (Unreadable, TypeError, RuntimeError) as error:
        raise AssertionError(f"{told}: served though it means nothing") from error
    assert out.shape == truth.shape, f"{told}: {tuple(out.shape)} for {tuple(truth.shape)}"
    coarse = max(torch.finfo(call.given[n].dtype).eps for n in ("query", "key", "value"))
    largest = [float(call.given[n].detach().double().abs().nan_to_num(0, 0, 0).amax()) if call.given[n].numel() else 0.0
               for n in ("query", "key", "value")]  # fmt: skip
    scores = largest[0] * largest[1] * abs(float(call.given["scaling"])) * call.given["query"].shape[3]
    if not scores < 1e36:
        return "served"  # beyond what fp32 holds
    finite = torch.isfinite(out).all(3)
    assert not (bad & finite).any(), f"{told}: not-a-numbers were lost"
    shown = (call.given.get(name) for name in ("key", "value", "position_bias", "s_aux"))
    clean = all(torch.isfinite(t.detach()).all() for t in shown if isinstance(t, Tensor))
    beyond = truth.abs() > torch.finfo(out.dtype).max
    own = ~torch.isfinite(call.given["query"].detach()).all(3).transpose(1, 2).expand_as(finite)
    # weights of 0 do not keep a hidden key's not-a-number out, in torch's kernels neither, nor that of a blind query
    bad = bad | own
    assert (finite | bad | beyond.any(3)).all() or not clean, f"{told}: not-a-numbers out of nothing"
    if scores * coarse > 0.1:
        return "served"  # rounding decides between keys
    compared = finite & ~bad
    limit = coarse * (30 + 30 * scores) * max(1.0, largest[2])
    error_ = float((out.double() - truth)[compared].abs().amax()) if out[compared].numel() else 0.0
    assert error_ <= limit, f"{told}: off by {error_:.2e}, allowed {limit:.2e}"
    return "served"
