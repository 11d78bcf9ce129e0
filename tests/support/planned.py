"""Plans of any choices for calls of any shape, drawn by hypothesis, and their judgement by their definition."""

from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from adaattn_hf.attention import reference
from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.heads import some_heads
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends import select
from adaattn_hf.backends.select import BackendRefusal
from adaattn_hf.plans import execute
from adaattn_hf.plans.bound_layer import BoundLayer
from adaattn_hf.plans.choices import Choice, Part, Precision, Rank, Window
from adaattn_hf.plans.choices.part import is_decode
from adaattn_hf.plans.plan import LayerPlan
from adaattn_hf.plans.tensors import LayerTensors

from .calls import DEFAULTS, HALF, bound, calls, default_dtype, generator, words_of
from .choices import precision_of
from .malformed import Shown


@st.composite
def choices(draw: st.DrawFn, columns: int) -> Choice:
    sinks = draw(st.sampled_from([0, 1, 4, 70]))
    keys = [None, Window(draw(st.integers(1, 90)), sinks)]
    rank = Rank(draw(st.integers(1, columns)))
    drawn: list[Part | None] = [draw(st.sampled_from(keys)), draw(st.sampled_from([None, None, rank]))]
    drawn.append(draw(st.sampled_from([None, None, Precision("bf16"), Precision("int8")])))
    return Choice.of(*(part for part in drawn if part is not None))


@dataclass(repr=False)
class Planned(Shown):
    """A layer's plan, a call, the backend that is named for it, and torch's default dtype."""

    bound_layer: BoundLayer
    call: AttentionCall
    backend: str | None
    default: torch.dtype = torch.float32

    def __repr__(self) -> str:
        labels = [choice.label for choice in self.bound_layer.plan.choices]
        more = f"{words_of(self.call)}, default {self.default}"
        return f"Planned({labels}, {self.bound_layer.max_length}, {self.backend}, {more})"


@st.composite
def planned(draw: st.DrawFn) -> Planned:
    """A plan with its means and bases, and a call that is long enough for blocks to be left out now and then."""
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.float32, *HALF]))
    call = replace(draw(calls(dtype=dtype, longest=draw(st.sampled_from([70, 300])))), need_lse=False)
    # a dense mask is read as rules, which is a test of its own: tests/model/test_plan_compile.py
    call = replace(call, structure=call.structure.with_changes(mask=None).simplified())
    heads, dim = call.key.shape[1], call.key.shape[3]
    taken = [draw(choices(dim)) for _ in range(heads)]
    if draw(st.booleans()):
        taken = [taken[0]] * heads
    random = generator(draw(st.integers(0, 999)))
    query_basis, key_basis = (
        {head: torch.randn(dim, dim, generator=random) / dim**0.5 for head in range(heads)} for _ in range(2)
    )
    mean = torch.randn(heads, dim, generator=random) if draw(st.booleans()) else None
    limit = draw(st.sampled_from([10**6, 10**6, call.key.shape[2] // 2]))
    bound_layer = BoundLayer(LayerPlan(0, "", tuple(taken)), LayerTensors(mean, query_basis, key_basis), limit)
    backend = draw(st.sampled_from([None, "native", "sdpa", "eager"]))
    return Planned(bound_layer, call, backend, draw(st.sampled_from(DEFAULTS)))


def rounding(call: AttentionCall, out: Tensor, dtype: torch.dtype) -> float:
    """How far the order of operations may lead in a dtype: a score of size s is known to s roundings of it."""
    scores = float(call.query.abs().amax() * call.key.abs().amax()) * abs(call.scaling)
    spread: float = 4 + scores * call.query.shape[3] ** 0.5
    return 2 * torch.finfo(dtype).eps * max(1.0, float(out.abs().amax())) * spread


def definition(bound_layer: BoundLayer, call: AttentionCall) -> tuple[Tensor, float]:
    """What the plan computes by its choices' own definitions, in double precision, and how far rounding may lead."""
    parts, limits = [], []
    few = is_decode(call.structure)
    for head, choice in enumerate(bound_layer.plan.choices):
        changed = choice.defined(some_heads(call, [head]), [head], bound_layer.tensors)
        parts.append(reference.attention(changed).out)
        limits.append(bound(changed, parts[-1]))
        if isinstance(few, Tensor):  # sequences of few rows beside longer ones, in the model's precision
            unrounded = Choice.of(*(part for part in choice.parts if not isinstance(part, Precision)))
            of_few = reference.attention(unrounded.defined(some_heads(call, [head]), [head], bound_layer.tensors)).out
            parts[-1] = torch.where(few[:, :, None, None], of_few, parts[-1])
        if precision_of(choice) == "bf16":
            limits[-1] = max(limits[-1], rounding(changed, parts[-1], torch.bfloat16))
    within = execute.rows_within(call.structure, bound_layer.max_length, call.query.device)
    exact = reference.attention(call).out
    out = torch.cat(parts, 2)
    if within is not True:
        out = exact if within is False else torch.where(within[:, :, None, None], out, exact)
    return out, max(*limits, bound(call, exact))


def as_traced(call: AttentionCall) -> AttentionCall:
    """The call as a traced graph holds it: its rules are a dense mask, beside which its padding stands."""
    rules = call.structure
    padding = rules.key_padding
    if padding is None:
        padding = torch.ones(rules.batch, rules.kv_len, dtype=torch.bool)
    mask = rules.visible().expand(rules.batch, -1, -1, -1)
    traced = MaskStructure(
        rules.batch, rules.q_len, rules.kv_len, q_offset=torch.tensor(rules.q_offset), key_padding=padding, mask=mask
    )
    return replace(call, structure=traced)


def judge(made: Planned) -> str:
    """`served`, or `refused` where the kernels that are named do not take such a call.

    Raises:
        AssertionError: The output is not what the definition has; or the operator of traced graphs computes otherwise.
    """
    bound_layer, call, backend = made.bound_layer, made.call, made.backend
    rounds_weights = any(precision_of(choice) == "int8" for choice in bound_layer.plan.choices) and backend != "eager"
    try:
        with torch.no_grad(), default_dtype(made.default):
            found = execute.attend(bound_layer, call, backend).out
    except BackendRefusal:
        return "refused"
    assert found.dtype == call.query.dtype
    if not rounds_weights:  # tests/native/test_plans.py holds int8 products to their signal-to-noise ratio
        truth, limit = definition(bound_layer, call)
        error = float((found.double() - truth).abs().amax())
        assert error <= limit, f"off by {error:.2e}, allowed {limit:.2e}"
    with torch.no_grad():
        assert torch.equal(execute._traced(bound_layer, call, backend), found), "traced differs"
        rules = call.structure
        itself = rules.window == 1 and not rules.causal  # as it is to a causal row
        if rules.chunk is not None or rules.sinks or rules.spans is not None or itself:
            return "served"  # no traced graph of a model has these beside a plan
        try:
            traced = execute._traced(bound_layer, replace(as_traced(call), window=rules.window), backend)
        except ValueError as error:
            if "counts keys from a sequence's first" in str(error):
                return "served"
            raise
    away = (traced.double() - found.double()).abs()
    if bound_layer.max_length < rules.kv_len:
        # a mask need not tell how long a sequence is, and so not whether the plan speaks for it: exact is right, too
        exact = select.attend(call, backend).out.double()
        away = torch.minimum(away, (traced.double() - exact).abs().amax((2, 3), keepdim=True))
    error = float(away.amax())
    rounded = any(precision_of(choice) == "bf16" for choice in bound_layer.plan.choices)
    limit = rounding(call, found, torch.bfloat16 if rounded else found.dtype)
    assert error <= limit, f"from a dense mask: off by {error:.2e}, allowed {limit:.2e}"
    return "served"
