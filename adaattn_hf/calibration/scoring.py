"""How a model is scored: which tokens it reads, which predictions count, and what the true tokens are.

A causal model predicts every next token of a sequence in one pass. A masked-language model predicts tokens at masked
positions, which are drawn by a seed, in several passes (readings) over each sequence. The rest of calibration is the
same for both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..plans.choices.window import WINDOWS, WINDOWS_BOTH_WAYS
from .settings import Masking


@dataclass(frozen=True, eq=False)
class Reading:
    """One pass over a sequence: its token ids `[1, n]`, and the true tokens `[scored]` of its predictions.

    `places` `[scored]` are the positions of these predictions; `None` if every position predicts the next token (the
    last one has no target).
    """

    tokens: Tensor
    targets: Tensor
    places: Tensor | None = None

    @property
    def rows_per_prediction(self) -> float:
        """Query rows per scored prediction; converts a loss per row into a loss per predicted token."""
        return 1.0 if self.places is None else self.tokens.shape[1] / len(self.places)


Input = Tensor | Reading
"""Input of a model: `[1, n]` token ids that each predict the next one, or a reading."""


def reading_of(given: Input) -> Reading:
    """Returns the reading itself, or for token ids `[1, n]` the reading that predicts every next token."""
    return given if isinstance(given, Reading) else Reading(given, given[0, 1:])


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

    def windows(self, asked: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the windows to consider: those asked for."""
        return asked

    def readings(self, tokens: Sequence[int], seed: int, device: torch.device) -> list[Reading]:
        """Returns the one reading of a sequence, whatever the seed."""
        return [reading_of(torch.tensor([tokens], dtype=torch.int64, device=device))]

    def words(self) -> dict[str, Any]:
        """Returns the protocol as a plan keeps it."""
        return {"predicts": "the next token, at every position"}


NEXT_TOKEN = NextToken()


@dataclass(frozen=True)
class MaskedTokens:
    """Masked-language models: true tokens at a `share` of masked positions, in `count` readings of each sequence.

    The masked positions of different readings are disjoint as long as there are positions left. Special tokens before a
    text (`prefix`) and after it (`suffix`) are never masked.
    """

    mask_token: int
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    share: float = Masking.mask_share
    count: int = Masking.maskings

    causal: ClassVar[bool] = False
    generates: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0.0 < self.share < 1.0:
            raise ValueError(f"mask_share is {self.share}, expected a share of the tokens such as 0.15")
        if self.count < 1:
            raise ValueError(f"maskings is {self.count}, expected at least 1 reading of each sequence")

    @classmethod
    def of(cls, tokenizer: Any, share: float = Masking.mask_share, count: int = Masking.maskings) -> MaskedTokens:
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
        whole = list(tokenizer("a").input_ids)
        body = list(tokenizer("a", add_special_tokens=False).input_ids)
        for at in range(len(whole) - len(body) + 1):
            if whole[at : at + len(body)] == body:
                return cls(int(mask), tuple(whole[:at]), tuple(whole[at + len(body) :]), share, count)
        raise ValueError(f"tokenizer: it gives {whole} for 'a', expected {body} with special tokens before and behind")

    def content(self, length: int) -> int:
        """Returns `length` less the special tokens."""
        return length - len(self.prefix) - len(self.suffix)

    def windows(self, asked: tuple[int, ...]) -> tuple[int, ...]:
        """Returns windows for bidirectional attention instead of the default ones, which are for causal attention."""
        return WINDOWS_BOTH_WAYS if asked == WINDOWS else asked

    def readings(self, tokens: Sequence[int], seed: int, device: torch.device) -> list[Reading]:
        """Returns the readings of a sequence; every masked token is replaced by the mask token."""
        digest = hashlib.sha256(f"{seed}:{','.join(map(str, tokens))}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        whole = torch.tensor([*self.prefix, *tokens, *self.suffix], dtype=torch.int64, device="cpu")
        size = max(1, round(self.share * len(tokens)))
        found: list[Reading] = []
        pieces: list[Tensor] = []
        for _ in range(self.count):
            if not pieces:
                order = torch.randperm(len(tokens), generator=generator, device="cpu")
                pieces = list(order[: len(tokens) // size * size].split(size))
            places = pieces.pop(0).sort().values + len(self.prefix)
            masked = whole.clone()
            masked[places] = self.mask_token
            found.append(Reading(masked[None].to(device), whole[places].to(device), places.to(device)))
        return found

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


Scoring = NextToken | MaskedTokens
"""How one kind of model is scored."""
