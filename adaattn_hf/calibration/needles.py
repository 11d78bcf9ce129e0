"""Needles in the user's own text: does attention still find what lies far behind?

A haystack is a stretch of the text. Several needles, each a key of tokens and a value of tokens, are written
into it at spread depths; at the end every key is repeated and the value must come out as the likeliest
tokens. Keys and values are drawn from the haystack's own vocabulary, and all needles share one context, so
that a needle must be told from the others. A quarter of the needles repeats the key of another one, half a
haystack before it, with a value of its own; both are asked for, and the first token may be that of either.
(RULER, Hsieh et al. 2024, calls the two multi-key and multi-value.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention.tap import Tap, tapping
from .arms import ModelArms

KEY = 6
VALUE = 4


@dataclass(frozen=True)
class Haystack:
    """One context with its needles.

    Attributes:
        tokens: `[length]` token ids, needles and questions included.
        answers: Per needle the position of the first value token in the question.
        depths: Per needle its place in the haystack, 0 first to 1 last.
        likely: Per needle the first tokens that its key may bring to mind, one for each of its values.
    """

    tokens: Tensor
    answers: tuple[int, ...]
    depths: tuple[float, ...]
    likely: tuple[tuple[int, ...], ...]


def most(length: int) -> int:
    """Returns how many needles a haystack of that many tokens can hold."""
    return length // (3 * (KEY + VALUE))


def build(text: Tensor, needles: int, generator: torch.Generator) -> Haystack:
    """Returns a haystack of the length of `text` with `needles` needles and their questions at the end.

    Args:
        text: `[length]` token ids.
        needles: Number of needles.
        generator: Draws keys, values and the order of the questions.

    Raises:
        ValueError: If the text is too short for that many needles.
    """
    size = KEY + VALUE
    room = len(text) - 2 * needles * size
    if room < needles * size:
        raise ValueError(
            f"needles is {needles} in a text of {len(text)} tokens, expected at most {most(len(text))}"
        )
    vocabulary = torch.tensor(sorted(set(text.tolist())), device="cpu")
    drawn = vocabulary[torch.randint(len(vocabulary), (needles, size), generator=generator, device="cpu")]
    twice = needles // 4
    drawn[needles // 2 : needles // 2 + twice, :KEY] = drawn[:twice, :KEY]
    keys = [tuple(key) for key in drawn[:, :KEY].tolist()]
    likely = tuple(
        tuple(int(other[KEY]) for other, its in zip(drawn, keys, strict=True) if its == key) for key in keys
    )
    depths = tuple((index + 0.5) / needles for index in range(needles))
    pieces, start = [], 0
    for index, depth in enumerate(depths):
        stop = int(depth * room)
        pieces += [text[start:stop], drawn[index]]
        start = stop
    pieces.append(text[start:room])
    position = sum(len(piece) for piece in pieces)
    answers = [0] * needles
    for index in torch.randperm(needles, generator=generator, device="cpu").tolist():
        pieces.append(drawn[index])
        answers[index] = position + KEY
        position += size
    return Haystack(torch.cat(pieces), tuple(answers), depths, likely)


def is_found(haystack: Haystack, needle: int, likeliest: Sequence[int]) -> bool:
    """Returns whether the likeliest tokens in the place of a needle's value are what its key may bring to mind."""
    answer = haystack.answers[needle]
    rest = haystack.tokens[answer + 1 : answer + VALUE].tolist()
    return likeliest[0] in haystack.likely[needle] and list(likeliest[1:]) == rest


@torch.no_grad()
def retrieved(arms: ModelArms, haystack: Haystack, tap: Tap | None) -> tuple[bool, ...]:
    """Returns for each needle whether its value tokens are the model's likeliest, given those before.

    A tap of `None` lets the model answer as it is, by its plan if it carries one.
    """
    with tapping(tap):
        hidden = arms.hidden(haystack.tokens[None].to(arms.device))
    found = []
    for needle, answer in enumerate(haystack.answers):
        logits = arms.logits(hidden[:, answer - 1 : answer + VALUE - 1])
        found.append(is_found(haystack, needle, logits[0].argmax(-1).tolist()))
    return tuple(found)
