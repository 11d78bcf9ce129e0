"""Scores of up to 6e4 in half precision, where a product overflows or a rounded score moves weights: outputs, returned
weights and their gradients against double precision, as the same numbers give it. Additive masks of any size: rows that
see nothing but large numbers are the softmax of their sums in fp32, as in stock attention."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends.native.library import missing
from adaattn_hf.patches.call.interface import attention_function
from adaattn_hf.plans import execute
from adaattn_hf.plans.bound_layer import BoundLayer
from adaattn_hf.plans.plan import Choice, LayerPlan
from adaattn_hf.plans.tensors import LayerTensors

from ..support.calls import HALF, generator
from ..support.choices import make_choice
from ..support.malformed import Layer

HUGE = 6e4


@dataclass
class Drawn:
    """Queries, keys and values in half precision, the factor on their products, and directions to differentiate in."""

    leaves: list[Tensor]
    scaling: float
    directions: tuple[Tensor, Tensor]


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    dtype, source = draw(st.sampled_from(HALF)), generator(draw(st.integers(0, 999)))
    length, size = draw(st.sampled_from([1, 5, 33])), draw(st.sampled_from([8, 64]))
    heads, largest = draw(st.sampled_from([2, 4])), draw(st.sampled_from([1e3, 1e4, HUGE]))
    query, key, value = (torch.randn(2, n, length, size, generator=source) for n in (heads, 2, 2))
    scaling = size**-0.5
    if draw(st.booleans()):  # a large score that all keys share, beside small ones
        query[..., :2] = key[..., :2] = (largest / scaling / 2) ** 0.5
    else:
        spread = draw(st.sampled_from([1.0, 40.0]))
        query, key = query * spread, key * spread
        scaling = largest / float((query @ key.repeat_interleave(heads // 2, 1).mT).abs().amax())
    directions = (
        torch.randn(2, length, heads, size, generator=source), torch.randn(2, heads, length, length, generator=source),
    )  # fmt: skip
    return Drawn([t.to(dtype) for t in (query, key, value)], scaling, directions)


def plain(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    scores = query @ key.mT * scaling
    hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, -float("inf")).softmax(3)
    return (weights @ value).transpose(1, 2), weights


def with_gradients(leaves: list[Tensor], directions: tuple[Tensor, ...], answers: tuple[Tensor, ...]) -> list[Tensor]:
    """The answers, and the gradient of each in its direction by every tensor."""
    found = list(answers)
    for answer, direction in zip(answers, directions, strict=True):
        total = (answer.double() * direction.double()).sum()
        found += torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True, materialize_grads=True)
    return [t.detach().double() for t in found]


@pytest.mark.parametrize("backend", [None, "eager", "sdpa"])
@pytest.mark.parametrize("wanted", [False, True], ids=["output", "with weights"])
@given(call=drawn())
def test_huge_scores_in_half_precision_are_those_of_double(backend: str | None, wanted: bool, call: Drawn) -> None:
    if backend is None and missing():
        pytest.skip("; ".join(missing()))
    ours = [t.clone().requires_grad_() for t in call.leaves]
    out, weights = attention_function(backend)(Layer(1), *ours, None, scaling=call.scaling, output_attentions=wanted)
    exact = [t.double().requires_grad_() for t in call.leaves]
    truth = plain(*exact, call.scaling)
    answers: tuple[Tensor, ...] = (out,) if weights is None else (out, weights)
    assert len(answers) == 1 + wanted
    found = with_gradients(ours, call.directions[: len(answers)], answers)
    right = with_gradients(exact, call.directions[: len(answers)], truth[: len(answers)])
    # fp32 sums of products err by some units in their last place, and a weight by as much as its score
    query, key, value = (t.double().abs() for t in call.leaves)
    groups = query.shape[1] // key.shape[1]
    sums = float((query @ key.repeat_interleave(groups, 1).mT).amax()) * call.scaling
    off = torch.finfo(call.leaves[0].dtype).eps + 4 * torch.finfo(torch.float32).eps * sums
    slopes = max(1.0, float(value.amax())) * max(float(d.abs().amax()) for d in call.directions) * value.shape[3]
    for index, (a, b) in enumerate(zip(found, right, strict=True)):
        assert torch.isfinite(a).all()
        scale = max(1.0, float(value.amax()))
        if index >= len(answers):  # of queries, keys, values in turn
            by = (index - len(answers)) % 3
            scale = slopes if by == 2 else slopes * call.scaling * float((key, query)[by].amax())
            scale *= query.shape[2] * groups if by else 1
        error = float((a - b).abs().amax())
        assert error <= 2 * off * scale, (index, error, 2 * off * scale)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_a_score_rounded_in_half_precision_would_show(dtype: torch.dtype) -> None:
    query, key, value = (torch.randn(1, 2, 33, 64, generator=generator(seed)) for seed in range(3))
    query[..., :2] = key[..., :2] = 200.0
    leaves = [t.to(dtype) for t in (query, key, value)]
    truth = plain(*(t.double() for t in leaves), 0.125)[0]
    assert not (plain(*leaves, 0.125)[0].double() - truth).abs().amax() < 0.5  # not a number in float16
    found = attention_function("eager")(Layer(1), *leaves, None, scaling=0.125)[0]
    assert (found.double() - truth).abs().amax() < 0.03


@st.composite
def masked(draw: st.DrawFn) -> tuple[list[Tensor], Tensor]:
    """Queries, keys and values of one dtype, and an additive mask of one that may be another, some rows of it large."""
    dtype, source = draw(st.sampled_from([torch.float32, *HALF])), generator(draw(st.integers(0, 999)))
    q_len, kv_len = draw(st.sampled_from([1, 3, 40])), draw(st.sampled_from([3, 150]))
    leaves = [torch.randn(2, heads, n, 16, generator=source) for heads, n in ((4, q_len), (2, kv_len), (2, kv_len))]
    numbers = draw(st.sampled_from([dtype, torch.float32, torch.float64]))
    least = torch.finfo(numbers).min
    fills = [max(least, fill) for fill in (-1e9, -1e30, -2.3e38, -2.4e38, -3.4e38)]
    mask = torch.zeros(2, draw(st.sampled_from([1, 4])), q_len, kv_len, dtype=numbers)
    mask[:, :, 0] = draw(st.sampled_from([-torch.inf, *fills]))
    mask[1:, -1:, -1, kv_len // 2 :] = draw(st.sampled_from([-torch.inf, *fills]))
    mask[1:, -1:, -1, : kv_len // 2] = draw(st.sampled_from([0.0, *fills]))
    return [t.to(dtype) for t in leaves], mask


def of_sums(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """The softmax of sums in fp32, zeros where all are -inf, and the output."""
    key, value = (t.repeat_interleave(2, 1) for t in (key, value))
    most = torch.finfo(torch.float32).max
    scores = query @ key.mT / 4 + torch.where(mask.isinf(), mask, mask.double().clamp(-most, most)).float()
    nothing = mask.isneginf().all(3, keepdim=True)
    return (scores.masked_fill(nothing, 0).softmax(3) * ~nothing @ value).transpose(1, 2)


@pytest.mark.parametrize("backend", [None, "native", "eager", "sdpa"])
@given(call=masked())
def test_a_finite_mask_hides_nothing_however_large_its_numbers(
    backend: str | None, call: tuple[list[Tensor], Tensor]
) -> None:
    if backend == "native" and missing():
        pytest.skip("; ".join(missing()))
    leaves, mask = call
    dtypes = torch.float32, leaves[0].dtype
    exact, ours = ([t.to(dtype, copy=True).requires_grad_() for t in leaves] for dtype in dtypes)
    truth, found = of_sums(*exact, mask), attention_function(backend)(Layer(2), *ours, mask)[0]
    bound = 4 * torch.finfo(leaves[0].dtype).eps * max(4.0, float(leaves[2].detach().abs().amax()))
    assert (found - truth).abs().amax() <= bound
    if backend == "sdpa" or (backend is None and missing()):
        return  # torch's kernels read weights off a log-sum-exp that has no digits left for them
    direction = torch.ones_like(truth).cumsum(1) / truth.shape[1]
    right, computed = ((t * direction).sum() for t in (truth, found))
    for a, b in zip(torch.autograd.grad(computed, ours), torch.autograd.grad(right, exact), strict=True):
        assert (a - b).abs().amax() <= 16 * bound


INT8, WINDOW = make_choice(precision="int8"), make_choice("window", 48, 4)


@pytest.mark.parametrize(("choice", "fill"), [(INT8, -1e9), (INT8, -3.4e38), (WINDOW, -3.4e38)])
def test_a_plan_computes_rows_of_large_numbers_as_their_sums(choice: Choice, fill: float) -> None:
    query, key, value = (torch.randn(1, 2, 70, 16, generator=generator(seed)) for seed in range(3))
    mask = torch.full((1, 1, 70, 70), fill).triu(1)
    mask[:, :, :5] = fill
    mask[..., :5] = fill
    bound_layer = BoundLayer(LayerPlan(0, "", (choice, choice)), LayerTensors(None, {}, {}), 10**6)
    found = execute.attend(bound_layer, AttentionCall(query, key, value, MaskStructure(1, 70, 70), 0.25, bias=mask)).out
    truth = ((query @ key.mT / 4 + mask).softmax(3) @ value).transpose(1, 2)
    assert (found - truth)[:, :5].abs().amax() < 0.02
    assert (found - truth)[:, 5:40].abs().amax() < (0.04 if choice is INT8 else 1e-5)
