"""What a model is scored on: which tokens it reads, which predictions count, and what the true tokens are.

A causal model predicts every next token of a sequence in one pass. A masked-language model predicts tokens at masked
positions, which are drawn by a seed, in several passes over each sequence. All else is the same for both.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from adaattn_hf.errors import ModelUnavailable
from adaattn_hf.plans.choices.window import WINDOWS, WINDOWS_BOTH_WAYS

from .windows import TokenWindow, next_token


def special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Returns the special tokens that a tokenizer puts before and after a text."""
    whole = tokenizer.encode("a", verbose=False)
    body = tokenizer.encode("a", add_special_tokens=False, verbose=False)
    for at in range(len(whole) - len(body) + 1):
        if whole[at : at + len(body)] == body:
            return whole[:at], whole[at + len(body) :]
    raise ModelUnavailable(
        f"tokenizer: that of {tokenizer.name_or_path!r} gives {whole} for 'a', expected {body} with special tokens "
        "before and behind"
    )


@dataclass(frozen=True)
class NextToken:
    """Causal models: every next token, in one reading.

    They generate text, so that needles are tested and decode steps have a price.
    """

    causal: ClassVar[bool] = True
    generates: ClassVar[bool] = True

    def content(self, length: int) -> int:
        """Returns how many tokens of text a sequence of `length` tokens holds: all of them."""
        return length

    def spans(self, windows: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the windows of attention to consider: those asked for."""
        return windows

    def windows(self, tokens: Sequence[int], seed: int) -> list[TokenWindow]:
        """Returns the one window of a sequence, whatever the seed."""
        return [next_token(tokens)]

    def words(self) -> dict[str, Any]:
        """Returns the protocol as a plan keeps it."""
        return {"predicts": "the next token, at every position"}


NEXT_TOKEN = NextToken()


@dataclass(frozen=True)
class MaskedTokens:
    """Masked-language models: true tokens at a `share` of masked positions, in `count` windows of each sequence.

    The masked positions of different windows are disjoint as long as there are positions left. Special tokens before a
    text (`prefix`) and after it (`suffix`) are never masked.
    """

    mask_token: int
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    share: float = 0.15
    count: int = 4

    causal: ClassVar[bool] = False
    generates: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0.0 < self.share < 1.0:
            raise ValueError(f"mask_share is {self.share}, expected a share of the tokens such as 0.15")
        if self.count < 1:
            raise ValueError(f"maskings is {self.count}, expected at least 1 reading of each sequence")

    @classmethod
    def of(cls, tokenizer: Any, share: float = share, count: int = count) -> Self:
        """Returns the scoring with a tokenizer's mask token and the special tokens that it puts around a text.

        A tokenizer without a mask token is refused, and one that changes a text that it puts special tokens around.
        """
        mask = tokenizer.mask_token_id
        if mask is None:
            raise ValueError(
                f"tokenizer: that of {tokenizer.name_or_path!r} has no mask token, expected the one that the model was "
                "trained with: a masked-language model is scored on masked tokens; set tokenizer.mask_token, or give "
                "the tokenizer that belongs to the model"
            )
        prefix, suffix = special_tokens(tokenizer)
        return cls(int(mask), tuple(prefix), tuple(suffix), share, count)

    def content(self, length: int) -> int:
        """Returns `length` less the special tokens."""
        return length - len(self.prefix) - len(self.suffix)

    def spans(self, windows: tuple[int, ...]) -> tuple[int, ...]:
        """Returns windows for bidirectional attention instead of the default ones, which are for causal attention."""
        return WINDOWS_BOTH_WAYS if windows == WINDOWS else windows

    def windows(self, tokens: Sequence[int], seed: int) -> list[TokenWindow]:
        """Returns the windows of a sequence; every masked token is replaced by the mask token."""
        digest = hashlib.sha256(f"{seed}:{','.join(map(str, tokens))}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        whole = np.array([*self.prefix, *tokens, *self.suffix], np.int64)
        size = max(1, round(self.share * len(tokens)))
        readings: list[TokenWindow] = []
        pieces: list[Tensor] = []
        for _ in range(self.count):
            if not pieces:
                order = torch.randperm(len(tokens), generator=generator, device="cpu")
                pieces = list(order[: len(tokens) // size * size].split(size))
            positions = pieces.pop(0).sort().values.numpy() + len(self.prefix)
            masked = whole.copy()
            masked[positions] = self.mask_token
            readings.append(TokenWindow("", masked, positions, whole[positions]))
        return readings

    def words(self) -> dict[str, Any]:
        """Returns the protocol as a plan keeps it."""
        return {
            "predicts": "tokens at masked positions, each replaced by the mask token",
            "mask_share": self.share,
            "maskings": self.count,
            "special_tokens": [list(self.prefix), list(self.suffix)],
            "retrieval": "does not apply: nothing is generated",
            "decode": "does not apply: nothing is generated",
        }


Objective = NextToken | MaskedTokens
"""What one kind of model is scored on."""
