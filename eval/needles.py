"""A needle-in-a-haystack test on the user's own text: can attention still retrieve tokens from far back?

A haystack is a chunk of the text. Several needles, each a key and a value of a few tokens, are inserted at evenly
spread depths. At the end every key is repeated, and the value must follow as the likeliest tokens. Keys and values
are drawn from the haystack's own vocabulary, and all needles share one context, so that they can be confused. A
quarter of the needles repeats the key of a needle half a haystack earlier with another value; both are asked for, and
the first token may be that of either. (RULER, Hsieh et al. 2024: multi-key and multi-value.)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from adaattn_hf.attention.listeners import Tap, tapping

from .arms import ModelArms
from .windows import TokenWindow

KEY = 6
VALUE = 4


@dataclass(frozen=True)
class Haystack:
    """A context of `[length]` tokens with its needles and questions.

    Per needle `answers` is the position of the first value token in the question, and `likely` the accepted first
    tokens, one for each value of its key.
    """

    tokens: Tensor
    answers: tuple[int, ...]
    likely: tuple[tuple[int, ...], ...]

    @property
    def asked(self) -> TokenWindow:
        """The window that is scored where values are asked for, and nowhere else."""
        scored = [answer + step - 1 for answer in self.answers for step in range(VALUE)]
        positions, tokens = np.array(scored, np.int64), self.tokens.numpy()
        return TokenWindow("", tokens, positions, tokens[positions + 1])


def most(length: int) -> int:
    """Returns how many needles a haystack of that many tokens can hold."""
    return length // (3 * (KEY + VALUE))


def build(text: Tensor, needles: int, generator: torch.Generator) -> Haystack:
    """Returns a haystack of the length of `text` `[length]` with `needles` needles and their questions at the end.

    There are at most as many needles as `most` says.
    """
    size = KEY + VALUE
    room = len(text) - 2 * needles * size
    vocabulary = torch.tensor(sorted(set(text.tolist())), dtype=torch.int64, device="cpu")
    drawn = vocabulary[torch.randint(len(vocabulary), (needles, size), generator=generator, device="cpu")]
    twice = needles // 4
    drawn[needles // 2 : needles // 2 + twice, :KEY] = drawn[:twice, :KEY]
    keys, first = [tuple(key) for key in drawn[:, :KEY].tolist()], drawn[:, KEY].tolist()
    likely = tuple(tuple(value for other, value in zip(keys, first, strict=True) if other == key) for key in keys)
    pieces, start = [], 0
    for index in range(needles):
        stop = int((index + 0.5) / needles * room)
        pieces += [text[start:stop], drawn[index]]
        start = stop
    pieces.append(text[start:room])
    position = sum(len(piece) for piece in pieces)
    answers = [0] * needles
    for index in torch.randperm(needles, generator=generator, device="cpu").tolist():
        pieces.append(drawn[index])
        answers[index] = position + KEY
        position += size
    return Haystack(torch.cat(pieces), tuple(answers), likely)


def is_found(haystack: Haystack, needle: int, likeliest: Sequence[int]) -> bool:
    """Returns whether the likeliest tokens after a needle's key are an accepted value."""
    answer = haystack.answers[needle]
    rest = haystack.tokens[answer + 1 : answer + VALUE].tolist()
    return likeliest[0] in haystack.likely[needle] and list(likeliest[1:]) == rest


def compared(outcomes: Sequence[tuple[bool, bool]]) -> tuple[int, int, int]:
    """Returns how many needles only exact attention finds, how many only the plan, and how many exact attention.

    `outcomes` say of each needle whether exact attention finds it, and whether the plan does.
    """
    lost, won = outcomes.count((True, False)), outcomes.count((False, True))
    return lost, won, lost + outcomes.count((True, True))


@torch.no_grad()
def retrieved(arms: ModelArms, haystack: Haystack, tap: Tap) -> tuple[bool, ...]:
    """Returns for each needle whether the model's likeliest tokens, teacher-forced, are its value."""
    with tapping(tap):
        hidden = arms.hidden(haystack.asked)
    likeliest = arms.logits(hidden)[0].argmax(-1).view(-1, VALUE).tolist()
    return tuple(is_found(haystack, needle, values) for needle, values in enumerate(likeliest))
