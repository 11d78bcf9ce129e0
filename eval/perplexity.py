"""Perplexity and its relatives, from sums; and, run as a script, the same as `adaattn eval`.

With `nll` the sum of -log p over all scored tokens of all documents (nats), as the field defines them:

    nll per token     nll / tokens
    perplexity        exp(nll / tokens)
    word perplexity   exp(nll / words)       words and bytes counted in the original documents,
    byte perplexity   exp(nll / bytes)       before any detokenisation (lm-evaluation-harness)
    bits per byte     nll / bytes / ln 2
"""

import math
from typing import Any


def totals(nll: float, tokens: int, words: int | None = None, size: int | None = None) -> dict[str, Any]:
    """All of it for one arm, as a report has it; None for what is not known."""
    return {
        "tokens": tokens,
        "words": words,
        "bytes": size,
        "nll": nll,
        "nll_per_token": nll / tokens,
        "perplexity": _exp(nll / tokens),
        "word_perplexity": _exp(nll / words) if words else None,
        "byte_perplexity": _exp(nll / size) if size else None,
        "bits_per_byte": nll / size / math.log(2) if size else None,
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
