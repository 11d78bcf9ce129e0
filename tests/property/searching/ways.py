"""The same attention by every door, in every way in which torch runs a function, with keywords that mean something."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad

from adaattn_hf.attention import reference
from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.patches.mask.structured_mask import StructuredMask
from tests.support.calls import DEFAULTS, HALF, bound, calls, default_dtype, generator, words_of
from tests.support.doors import HUB, door
from tests.support.malformed import Layer, Shown, refused

DOORS = (None, None, "native", "sdpa", "eager", HUB, HUB, HUB)
WAYS = ("called", "called", "traced", "forward mode", "batched")
SAID = (*["nothing"] * 4, "unknown keyword", "window without mask", "lengths", "weights")
REFUSED_ALWAYS = ("unknown keyword", "window without mask", "lengths that do not fit")
TOLD = ("one tensor", "equal tensors", "the first continues", "lengths that do not fit")
"""How lengths of keys are told beside those of queries, where a cache is filled."""
FILLS = (float("-inf"), float("-inf"), -1e30, -2.3e38, -2.4e38, -3.3e38, None)
"""What additive masks hold; None for the least number of their dtype. But for the first, none hides anything."""
Function = Callable[..., Tensor]


@dataclass(repr=False)
class Way(Shown):
    """A call, the door and the way that it takes, and what is said beside it."""

    call: AttentionCall
    door: str | None
    form: str  # how the mask is handed over: structure, boolean, additive, none; or made, as `mask`
    way: str  # one of WAYS
    said: str  # one of SAID or TOLD
    keywords: dict[str, Any]  # that say it
    default: torch.dtype  # torch's
    mask: Any = None  # a structure or a tensor
    slack: float = 0.0  # how far its own rounding of scores may lead, besides

    def __repr__(self) -> str:
        more = f"{words_of(self.call)}, default {self.default}"
        return f"Way({self.door}, {self.way}, {self.form}, {self.said}, {more})"


@st.composite
def ways(draw: st.DrawFn) -> Way:
    """Any call by any door in any way; what is said of windows and documents, over a call that has no mask."""
    call = replace(draw(calls(longest=31)), need_lse=False)
    said = draw(st.sampled_from(SAID))
    keywords: dict[str, Any] = {}
    form = draw(st.sampled_from(["structure", "boolean", "additive"]))
    if said in ("window without mask", "lengths"):
        length = min(call.query.shape[2], call.key.shape[2])
        plain = MaskStructure(1, length, length, causal=True)
        query, key, value = (t[:1, :, :length] for t in (call.query, call.key, call.value))
        call, form = AttentionCall(query, key, value, plain, call.scaling), "none"
        if said == "lengths":
            starts = sorted({0, *(draw(st.integers(0, length - 1)) for _ in range(2))})
            borders = torch.tensor([*starts, length], dtype=torch.int32)
            documents = torch.repeat_interleave(borders.diff())[None]
            plain = plain.with_changes(q_segments=documents, k_segments=documents)
            call = replace(call, structure=plain)
            keywords = {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders}
        elif length == 1:
            said = "nothing"  # a window of one key is no window then
        else:
            keywords = {"sliding_window": draw(st.integers(1, length - 1))}
    elif said == "unknown keyword":
        keywords = {"attention_gate": torch.ones(3)}
    elif said == "weights":
        keywords = {"output_attentions": True}
    way = draw(st.sampled_from(WAYS))
    return Way(call, draw(st.sampled_from(DOORS)), form, way, said, keywords, draw(st.sampled_from(DEFAULTS)))


@st.composite
def beside_a_cache(draw: st.DrawFn) -> Way:
    """Documents that are told by lengths behind what a cache holds, in a layer with or without a window."""
    given = draw(calls(longest=31, extras=False))
    kv_len = given.key.shape[2]
    assume(kv_len > 1)
    length = draw(st.integers(1, min(given.query.shape[2], kv_len - 1)))
    past, said = kv_len - length, draw(st.sampled_from(TOLD))
    window = draw(st.sampled_from([None, None, max(1, kv_len // 2)]))
    plain = MaskStructure(1, length, kv_len, causal=True, q_offset=past, window=window)
    starts = sorted({0, *(draw(st.integers(0, length - 1)) for _ in range(2))})
    cu_q = torch.tensor([*starts, length], dtype=torch.int32)
    more = torch.full_like(cu_q, past if said == "the first continues" else 0)
    if said == "lengths that do not fit":  # each document has more keys of its own, and all have too many
        assume(window is None or len(cu_q) > 2)  # a window may have lost tokens of the cache
        more = past + torch.arange(len(cu_q), dtype=torch.int32)
    more[0] = 0
    cu_k = cu_q if said == "one tensor" else cu_q + more
    queries = torch.repeat_interleave(cu_q.diff())[None] + 1
    keys = torch.cat([torch.full((1, past), int(said == "the first continues")), queries], 1)[:, None, None]
    own = plain.with_changes(mask=(queries[:, None, :, None] == keys) | (keys == 0))
    parts = given.query[:1, :, :length], given.key[:1], given.value[:1]
    call, told = AttentionCall(*parts, own, given.scaling), {"cu_seq_lens_q": cu_q, "cu_seq_lens_k": cu_k}
    # in a traced graph nobody reads whether lengths fit
    door, way = draw(st.sampled_from(DOORS)), draw(st.sampled_from(WAYS if said != TOLD[3] else WAYS[:2]))
    return Way(call, door, "made", way, said, told, draw(st.sampled_from(DEFAULTS)), plain)


@st.composite
def blind(draw: st.DrawFn) -> Way:
    """Masks of every form and dtype in which some rows see nothing; a finite number is added and hides nothing."""
    dtype = draw(st.sampled_from([torch.float32, torch.float32, *HALF]))
    call = replace(draw(calls(dtype, longest=31)), need_lse=False)
    rules, form, slack = call.structure, draw(st.sampled_from(["bool", "number", "number", "columns"])), 0.0
    row, rows = draw(st.integers(0, rules.batch - 1)), draw(st.integers(0, rules.q_len))
    if form == "columns":
        mask = torch.ones(rules.batch, rules.kv_len, dtype=draw(st.sampled_from([torch.bool, torch.int64, dtype])))
        mask[row, : draw(st.integers(0, rules.kv_len))] = 0
        at = rules.kv_len - rules.q_len if rules.q_len > 1 else 0
        rules = MaskStructure(rules.batch, rules.q_len, rules.kv_len, rules.q_len > 1, at, key_padding=mask.bool())
        given: Any = draw(st.sampled_from(DOORS)), "made", "called", "nothing", {}, draw(st.sampled_from(DEFAULTS))
        return Way(replace(call, structure=rules), *given, mask)
    seen = rules.visible().expand(rules.batch, -1, -1, -1).clone()
    seen[row, :, rows:] = False
    whole = MaskStructure(rules.batch, rules.q_len, rules.kv_len)
    if form == "bool":
        mask, call = seen, replace(call, structure=whole.with_changes(mask=seen))
    else:
        kind, fill = draw(st.sampled_from([torch.float32, dtype])), draw(st.sampled_from(FILLS))
        fill = torch.finfo(kind).min if fill is None or FILLS[0] < fill < torch.finfo(kind).min else fill
        mask = torch.zeros(seen.shape, dtype=kind).masked_fill(~seen, fill)
        slack = 0.05 if fill > -1e6 else 0.0  # half precision's least number leaves scores some digits
        call = replace(call, structure=whole, bias=mask if call.bias is None else mask.float() + call.bias)
    # a finite number leaves a row a slope that no difference of double precision shows
    way = draw(st.sampled_from([way for way in WAYS if way != "forward mode"]))
    given = draw(st.sampled_from(DOORS)), "made", way, "nothing", {}, draw(st.sampled_from(DEFAULTS))
    return Way(call, *given, mask, slack)


def function(way: Way) -> Function:
    call = way.call
    mask: Any = {"made": way.mask, "structure": call.structure}.get(way.form)
    named = {"softcap": call.softcap, "s_aux": call.sink_logits, "position_bias": call.bias}
    if isinstance(mask, MaskStructure):
        mask = StructuredMask(mask, torch.device("cpu"))
    elif way.form == "made" and mask.dim() == 4 and mask.is_floating_point():
        mask = named.pop("position_bias")
    elif way.form in ("boolean", "additive"):
        seen = call.structure.visible().expand(call.structure.batch, -1, -1, -1)
        mask = seen.clone() if way.form == "boolean" else torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))
    more = {name: value for name, value in named.items() if value is not None} | way.keywords
    return lambda *tensors: door(way.door)(Layer(1), *tensors, mask, scaling=call.scaling, **more)[0]


def other(call: AttentionCall) -> AttentionCall:
    source = generator(11)
    drawn = (torch.randn(t.shape, generator=source).to(t.dtype) for t in (call.query, call.key, call.value))
    return replace(call, **dict(zip(("query", "key", "value"), drawn, strict=True)))


def answers(way: Way) -> list[tuple[Tensor, Tensor, float]]:
    """What the way gives, what is true, and how far they may differ."""
    call, attend = way.call, function(way)
    first, second = (call.query, call.key, call.value), other(call)
    others = (second.query, second.key, second.value)
    truth = [reference.attention(each).out for each in (call, second)]
    slack = way.slack * float(call.value.abs().amax() + 4) if way.slack else 0.0
    limits = [bound(call, truth[0]) + slack, bound(second, truth[1]) + slack]
    with warnings.catch_warnings(), default_dtype(way.default):
        warnings.simplefilter("ignore")
        if way.way == "traced":
            with torch.no_grad():
                traced = torch.jit.trace(attend, first, check_trace=False)
                found = [traced(*first), traced(*others)]
        elif way.way == "batched":
            found = list(torch.func.vmap(attend)(*(torch.stack(pair) for pair in zip(first, others, strict=True))))
        elif way.way == "forward mode":
            tangent = torch.randn(call.query.shape, generator=generator(12), dtype=torch.float32)
            with forward_ad.dual_level():
                dual = forward_ad.unpack_dual(attend(forward_ad.make_dual(first[0], tangent), *first[1:]))
            assert dual.tangent is not None, "no tangent came out"
            found, step = [dual.primal, dual.tangent], 1e-4 * tangent
            ends = (replace(call, query=call.query.double() + move) for move in (step, -step))
            truth[1] = torch.sub(*(reference.attention(end).out for end in ends)) / 2e-4
            size = 1 + float(call.key.abs().amax() * tangent.abs().amax()) * abs(call.scaling)
            limits[1] = 1e-4 * size * max(1.0, float(truth[1].abs().amax()))
        else:
            with torch.no_grad():
                found = [attend(*first), attend(*others)]
    return list(zip(found, truth, limits, strict=True))


def judge(call: Way) -> str:
    """The verdict in a word; fails where an answer is wrong, or what the package refuses was swallowed."""
    try:
        compared = answers(call)
    except AssertionError:
        raise
    except Exception as error:  # which one is what is judged
        if isinstance(error, NotImplementedError) and (call.door, call.way) == ("sdpa", "forward mode"):
            return "refused as by stock"  # torch's own kernel has no tangent
        return refused(error)
    assert call.said not in REFUSED_ALWAYS, f"served with {call.keywords}"
    for found, truth, limit in compared:
        error = float((found.double() - truth).abs().amax()) if truth.numel() else 0.0
        assert error <= limit, f"off by {error:.2e}, allowed {limit:.2e}"
    return "served"
