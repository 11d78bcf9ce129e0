"""Graphs of whole models: compiled, traced or exported from one call, judged by that call and by another one."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.support.calls import default_dtype, generator
from tests.support.malformed import Shown, raised_here
from tests.support.models import VOCABULARY, main_output

from .inputs import POSITIONS, Inputs, masks, position_rows
from .oracle import answers, compare, documents, may_refuse
from .twins import ENCODERS, offers, twin
from .whole import Whole, keywords, wholes

WAYS = (*["compiled"] * 10, *["traced"] * 9, *["exported"] * 9, "inductor")
"""How graphs are made, inductor seldom: it takes seconds."""


@dataclass
class Graphed(Shown):
    """A model with two calls of the same shapes, of which the first makes the graph."""

    way: str
    first: Whole
    second: Inputs


@st.composite
def graphed(draw: st.DrawFn, keeps: bool = False) -> Graphed:
    way = draw(st.sampled_from(WAYS))
    first = draw(wholes(graph=True, keeps=keeps))
    assume(way in ("compiled", "inductor") or first.given.cache in ("off", "none"))
    return Graphed(way, first, draw(alike(first.given, first.family not in ENCODERS)))


@st.composite
def alike(draw: st.DrawFn, given: Inputs, decodes: bool) -> Inputs:
    """Other tokens, positions and masks of the same shapes and dtypes; documents stay, as their number is a shape."""
    rows, length = given.ids.shape
    words = dict(given.words)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator(draw(st.integers(0, 999))))
    mask, positions = given.mask, given.positions
    if mask is not None and given.borders is None:
        kinds = ["ones", "left", "right", "holes"] if mask.dim() == 2 else [words["mask"]]
        words["mask"] = draw(st.sampled_from(kinds))
        mask = draw(masks(rows, length, words["mask"], decodes))
    if positions is not None and given.borders is None:
        whole = [kind for kind in POSITIONS if kind != "fractional"]
        words["positions"] = draw(st.sampled_from(["fractional"] if positions.is_floating_point() else whole))
        positions = draw(position_rows(len(positions), length, words["positions"]))
    return replace(given, ids=ids, mask=mask, positions=positions, words=words)


class Called(nn.Module):
    """A model as a function of tensors alone, as tracers want it."""

    def __init__(self, model: Any, asked: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.names = model, [n for n, value in asked.items() if isinstance(value, Tensor)]
        self.rest = {name: value for name, value in asked.items() if name not in self.names}

    def forward(self, *tensors: Tensor) -> Tensor:
        return main_output(self.model(**dict(zip(self.names, tensors, strict=True)), **self.rest))


def graph(way: str, model: Any, given: Inputs) -> Callable[[Inputs], Tensor]:
    length = given.ids.shape[1]
    called = Called(model, keywords(model, given, 0, length))

    def tensors(other: Inputs) -> tuple[Tensor, ...]:
        # copies: what a call remembers by a tensor's identity is not what is searched here
        return tuple(keywords(model, other, 0, length)[name].clone() for name in called.names)

    made: Any
    if way == "traced":
        made = torch.jit.trace(called, tensors(given), check_trace=False)
    elif way == "exported":
        made = torch.export.export(called, tensors(given), strict=False).module()
    else:
        torch._dynamo.reset()
        made = torch.compile(called, backend="eager" if way == "compiled" else "inductor")
    return lambda other: made(*tensors(other))  # type: ignore[no-any-return]


def outputs(case: Graphed, implementation: str) -> list[Tensor]:
    """What a graph of the model under an implementation gives for both calls."""
    first = case.first
    model = twin(first.family, implementation, first.dtype)
    with warnings.catch_warnings(), default_dtype(first.default), torch.no_grad():
        warnings.simplefilter("ignore")
        made = graph(case.way, model, first.given)
        return [made(first.given), made(case.second)]


def stock_outputs(case: Graphed) -> Iterator[list[Tensor]]:
    """The same of stock attention, of each of its forms of which a graph can be made, as they are asked for."""
    for name in ("sdpa", "eager"):
        if offers(case.first.family, name):
            with suppress(Exception):  # any refusal is one
                yield outputs(case, name)


def late_documents(case: Graphed) -> bool:
    """Whether documents come beside a mask whose chunks, in a graph, count from the row's first key already."""
    given, config = case.first.given, twin(case.first.family, "eager", case.first.dtype).config
    chunked = getattr(config, "attention_chunk_size", None) is not None
    return case.way in ("compiled", "inductor") and chunked and given.borders is not None and given.mask is not None


def judge(case: Graphed) -> str:
    """The verdict on a graph in a word; fails where it computes otherwise than stock does, with a graph and without."""
    first = case.first
    both = [first, replace(first, given=case.second)]
    expected = [answers(each, documents(each, graph=True)) for each in both]
    if not all(expected):
        return "stock differs"
    try:
        found = outputs(case, first.implementation)
    except Exception as error:  # which one is what is judged
        if not any(stock_outputs(case)):
            return "refused as by stock"
        # a tracer sees nothing of what native kernels compute, and who names them gets them or a sentence
        blind = case.way == "traced" and first.implementation == "adaattn_native"
        if raised_here(error) and (blind or late_documents(case) or may_refuse(first)):
            return "refused"
        raise AssertionError(f"stock answers, here {type(error).__name__}: {error}") from error
    verdicts = set()
    for number, each in enumerate(both):
        try:
            verdicts.add(compare(each, found[number], expected[number]))
        except AssertionError as wrong:
            # stock attention, in graphs as well, reads across documents; a trace keeps how many tokens an expert had
            told = first.given.borders is not None and not (case.way == "traced" and "moe" in first.family)
            if told or any(right(each, theirs[number], expected[number]) for theirs in stock_outputs(case)):
                raise AssertionError(f"call {number + 1}: {wrong}") from wrong
            verdicts.add("stock differs")
    return "served" if verdicts == {"served"} else "stock differs"


def right(case: Whole, found: Tensor, expected: list[Tensor]) -> bool:
    try:
        compare(case, found, expected)
    except AssertionError:
        return False
    return True
