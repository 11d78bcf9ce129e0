"""What stock attention makes of a model's calls, and the comparison with it where its two forms agree."""

import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.support.calls import default_dtype
from tests.support.malformed import raised_here

from .inputs import Inputs
from .twins import BORDERLESS as BORDERLESS
from .twins import KERNEL as KERNEL
from .twins import offers, twin
from .whole import Whole, routing, run

CLOSE = {torch.float32: 2e-5, torch.bfloat16: 0.04}
"""How near two computations of one function are, by what holds the numbers, of the largest one."""
CODED = 0.1
"""How far a cache of eight bits may lead on average, in standard deviations, where tokens go to stock's experts."""


def apart(given: Inputs, starts: Tensor) -> list[list[Inputs]]:
    """Per row the documents, each as a call of its own. `starts` is `[rows, length]`, True at their first tokens."""
    rows, (count, length) = [], given.ids.shape
    positions = torch.arange(length)[None] if given.positions is None else given.positions
    for row in range(count):
        edges = [0, *(starts[row, 1:].nonzero()[:, 0] + 1).tolist(), length]
        place = positions[row % len(positions)][None]
        parts = ((given.ids[row : row + 1, a:b], place[:, a:b]) for a, b in itertools.pairwise(edges))
        rows.append([Inputs(*part, None, None, (part[0].shape[1],), "off") for part in parts])
    return rows


def documents(case: Whole, graph: bool = False) -> Tensor | None:
    """`[rows, length]`, True where a document starts that the package keeps apart and stock attention may not.

    Lengths always tell. Positions that fall back do in families whose masks lose borders, where nothing else was said
    and somebody can read them: not in a graph, and not in the Hub's kernel.
    """
    given = case.given
    starts = torch.zeros(given.ids.shape, dtype=torch.bool)
    if given.borders is not None:
        starts[0, given.borders[:-1].long()] = True
        return starts
    told = given.mask is None and given.cache == "off" and not graph
    if given.positions is None or not told or case.family not in BORDERLESS or case.implementation == KERNEL:
        return None
    starts[:, 1:] = given.positions.diff(dim=1) < 0
    return starts if starts.any() else None


def stock(case: Whole, implementation: str, starts: Tensor | None) -> Tensor | None:
    """What Transformers' own attention makes of the calls; None where it refuses them or the family has no such one."""
    if not offers(case.family, implementation):
        return None
    model, given = twin(case.family, implementation, case.dtype), replace(case.given, keep=None)
    try:
        with default_dtype(case.default):
            if starts is None:
                return run(model, given)
            return torch.cat([torch.cat([run(model, d) for d in row], 1) for row in apart(given, starts)])
    except Exception:  # any refusal is one
        return None


def answered(case: Whole) -> Tensor:
    """`[rows, length]`: tokens whose answers have a meaning: the real ones, and padding right behind them."""
    # other padding, or a chunk that begins with it, may see no key, and a prepared model leaves padding out
    real = case.given.real
    if case.prepared or "llama4" in case.family:
        return real
    behind = torch.zeros_like(real)
    behind[:, 1:] = real[:, :-1]
    return real | behind


def compare(case: Whole, found: Tensor, expected: list[Tensor]) -> str:
    """`served` where it is what stock's two answers are, or `stock differs` where no row of these is the same."""
    if case.given.keep is not None:  # stock attention was asked for all rows
        expected = [other[:, case.given.kept] for other in expected]
    real = answered(case)[:, case.given.kept]
    first, scale = expected[0].float(), float(expected[0].abs().nan_to_num(0).amax())
    close = CLOSE[case.dtype] * max(1.0, scale)
    agreed = real & torch.isfinite(first).flatten(2).all(2)
    for other in expected[1:]:
        agreed &= ((other.float() - first).abs() <= close).flatten(2).all(2)
    assert found.shape == first.shape, f"{tuple(found.shape)} for {tuple(first.shape)}"
    if not agreed.any():
        return "stock differs"
    away = (found.float() - first).abs()[agreed]
    if case.given.cache == "int8":
        mean = float(away.mean() / first[agreed].std())
        assert mean <= CODED, f"codes lead {mean:.2f} standard deviations away, allowed {CODED}"
        return "served"
    assert torch.isfinite(away).all(), "not-a-numbers where stock has none"
    assert float(away.amax()) <= 2 * close, f"off by {float(away.amax()):.2e}, allowed {2 * close:.2e}"
    return "served"


def answers(case: Whole, starts: Tensor | None = None) -> list[Tensor]:
    found = (stock(case, name, starts) for name in ("eager", "sdpa"))
    return [answer for answer in found if answer is not None]


def judge(case: Whole) -> str:
    """The verdict on a model's calls in a word; fails where it computes otherwise than stock, or refuses its calls."""
    model = twin(case.family, case.implementation, case.dtype, case.prepared)
    choices: list[Any] = []
    with routing(twin(case.family, "eager", case.dtype), choices, follow=False):
        expected = answers(case, documents(case))
    coded = case.given.cache == "int8"
    try:
        with default_dtype(case.default), routing(model, choices if coded else [], follow=True):
            found = run(model, case.given)
    except Exception as error:  # which one is what is judged
        if not expected:
            return "refused as by stock"
        if raised_here(error) and may_refuse(case):
            return "refused"
        raise AssertionError(f"stock answers, here {type(error).__name__}: {error}") from error
    assert expected, "stock refuses, here is an answer"
    return compare(case, found, expected)


def may_refuse(case: Whole) -> bool:
    """Whether a sentence is an answer: for a cache of codes, and from the Hub's kernel, which knows no documents."""
    return case.given.cache == "int8" or (case.implementation == KERNEL and case.given.borders is not None)
