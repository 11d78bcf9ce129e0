"""How a token sequence is cut into model inputs so that each token is scored once.

Two recipes, both widely used, which differ in what the first token of a document is conditioned on:

* `rolling`: the recipe of lm-evaluation-harness. A prefix token (BOS, else EOS) stands before the document,
  so that its first token is scored too. The first window scores `context` tokens; every later one scores the
  next `stride` tokens and is filled up on the left with what came before.
* `strided`: the recipe of Transformers' documentation page on perplexity. A window of `context` tokens every
  `stride` tokens, of which those are scored that no earlier window scored. There is no prefix: the first
  token of the document (and, where `stride == context`, the first of each window) has nothing before it in
  its window and is not scored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from adaattn_hf.errors import UsageError

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Window:
    """One model input and what is scored in it: rows of the logits, and the token that each should predict."""

    document: int
    input_ids: Tokens
    positions: Tokens
    targets: Tokens


def _tail(document: int, input_ids: Sequence[int], targets: Sequence[int]) -> Window:
    positions = np.arange(len(input_ids) - len(targets), len(input_ids), dtype=np.int64)
    return Window(document, np.asarray(input_ids, np.int64), positions, np.asarray(targets, np.int64))


def check(context: int, stride: int) -> None:
    """Raise `UsageError` where context and stride do not fit together."""
    if context < 2:
        raise UsageError(f"context: got {context}, expected at least 2 tokens; pass --context 1024, say")
    if not 1 <= stride <= context:
        raise UsageError(
            f"stride: got {stride}, expected 1 to the context, {context}: a larger stride would leave tokens out. "
            f"Pass --stride {context} for disjoint windows or --stride {context // 2} for half-overlapping ones"
        )


def rolling(tokens: Sequence[int], context: int, stride: int, prefix: int, document: int = 0) -> Iterator[Window]:
    """Windows of `rolling`: all tokens are scored, each once.

    With `stride == context` they are the disjoint windows of lm-evaluation-harness's `loglikelihood_rolling`
    (`get_rolling_token_windows(context_len=1)`); a smaller stride is its `context_len = context - stride +
    1`.
    """
    check(context, stride)
    first = tokens[:context]
    if not first:
        return
    yield _tail(document, [prefix, *first[:-1]], first)
    scored = len(first)
    while scored < len(tokens):
        end = min(scored + stride, len(tokens))
        yield _tail(document, tokens[end - 1 - context : end - 1], tokens[scored:end])
        scored = end


def strided(tokens: Sequence[int], context: int, stride: int, document: int = 0) -> Iterator[Window]:
    """Windows of `strided`: no prefix, and tokens with nothing before them in their window are not scored."""
    check(context, stride)
    done = 0
    for begin in range(0, len(tokens), stride):
        end = min(begin + context, len(tokens))
        scored = min(end - done, end - begin - 1)
        if scored > 0:
            yield _tail(document, tokens[begin : end - 1], tokens[end - scored : end])
        done = end
        if end == len(tokens):
            return


def masked(
    tokens: Sequence[int],
    context: int,
    mask: int,
    first: Sequence[int],
    last: Sequence[int],
    *,
    fraction: float = 1.0,
    seed: int = 0,
    document: int = 0,
) -> Iterator[Window]:
    """Windows of a masked-LM pseudo-perplexity: one input per scored token, with that token alone masked.

    The document is cut into disjoint pieces of `context - len(first) - len(last)` tokens, each put between
    the tokenizer's own special tokens. (Salazar et al. 2020, "Masked Language Model Scoring": the sum over
    positions of -log p(token | all others).) With `fraction < 1` only that share of each piece's positions is
    scored (at least one), drawn without replacement by a generator seeded with (seed, document, piece).
    """
    room = context - len(first) - len(last)
    if room < 1:
        raise UsageError(f"context: got {context}, expected more than the {context - room} special tokens of a window")
    for piece, begin in enumerate(range(0, len(tokens), room)):
        body = list(tokens[begin : begin + room])
        whole = np.asarray([*first, *body, *last], np.int64)
        count = max(1, round(fraction * len(body)))
        chosen = np.arange(len(body))
        if count < len(body):
            chosen = np.sort(np.random.default_rng((seed, document, piece)).choice(len(body), count, replace=False))
        for index in chosen:
            position = np.asarray([len(first) + int(index)], np.int64)
            input_ids = whole.copy()
            input_ids[position] = mask
            yield Window(document, input_ids, position, whole[position])


def continuation(prompt: Sequence[int], target: Sequence[int], context: int, document: int = 0) -> Window:
    """The window of a last-word item: `target` after `prompt`, cut on the left to `context` input tokens."""
    if not prompt or not target:
        raise ValueError(f"prompt and target: got {len(prompt)} and {len(target)} tokens, expected at least one each")
    if len(target) > context:
        raise UsageError(f"context: got {context}, expected at least the {len(target)} tokens of the last word")
    whole = [*prompt, *target][-(context + 1) :]
    return _tail(document, whole[:-1], target)
