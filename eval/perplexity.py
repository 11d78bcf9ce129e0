"""Perplexity and its relatives, from sums; and, run as a script, the same as `adaattn eval`.

With `nll` the sum of -log p over all scored tokens of all documents (nats), as the field defines them:

    nll per token     nll / tokens
    perplexity        exp(nll / tokens)
    word perplexity   exp(nll / words)       words and bytes counted in the original documents,
    byte perplexity   exp(nll / bytes)       before any detokenisation (lm-evaluation-harness)
    bits per byte     nll / bytes / ln 2
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Totals:
    """Sums over a corpus, for one arm. `words` and `bytes` are None where documents were cut short.

    Attributes:
        nll: sum of -log p of the scored tokens, nats.
        tokens: how many tokens were scored.
        words: words of the original documents.
        bytes: UTF-8 bytes of the original documents.
    """

    nll: float
    tokens: int
    words: int | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"tokens: got {self.tokens}, expected at least one scored token")

    @property
    def nll_per_token(self) -> float:
        """Nats per token."""
        return self.nll / self.tokens

    @property
    def perplexity(self) -> float:
        """exp of nats per token."""
        return _exp(self.nll_per_token)

    @property
    def word_perplexity(self) -> float | None:
        """exp of nats per word of the original text."""
        return _exp(self.nll / self.words) if self.words else None

    @property
    def byte_perplexity(self) -> float | None:
        """exp of nats per byte of the original text."""
        return _exp(self.nll / self.bytes) if self.bytes else None

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of the original text."""
        return self.nll / self.bytes / math.log(2) if self.bytes else None

    def as_dict(self) -> dict[str, float | int | None]:
        """All of it, for a report."""
        return {
            "tokens": self.tokens,
            "words": self.words,
            "bytes": self.bytes,
            "nll": self.nll,
            "nll_per_token": self.nll_per_token,
            "perplexity": self.perplexity,
            "word_perplexity": self.word_perplexity,
            "byte_perplexity": self.byte_perplexity,
            "bits_per_byte": self.bits_per_byte,
        }


def _exp(value: float) -> float:
    """exp, infinite where a float cannot hold it: an untrained model's word perplexity may be e^900."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


if __name__ == "__main__":
    import runpy
    import sys

    sys.argv[1:1] = ["eval"]
    runpy.run_module("adaattn_hf", run_name="__main__")
