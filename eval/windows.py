"""Text as model inputs: windows that score each token once, last words, and samples of sequences of one length.

Two recipes of windows, both widely used, which differ in what the first token of a document is conditioned on:

* `rolling`: the recipe of lm-evaluation-harness. A prefix token (BOS, else EOS) stands before the document,
  so that its first token is scored too. The first window scores `context` tokens; every later one scores the
  next `stride` tokens and is filled up on the left with what came before.
* `strided`: the recipe of Transformers' documentation page on perplexity. A window of `context` tokens every
  `stride` tokens, of which those are scored that no earlier window scored. There is no prefix: the first
  token of the document (and, where `stride == context`, the first of each window) has nothing before it in
  its window and is not scored.

A last word is scored as `lambada_openai` of lm-evaluation-harness states it. The prompt is the passage without its last
word, the target a space and the last word. An item is right where greedy decoding gives every token of the target.

A sample (`draw`) takes one pass and constant memory. Every candidate sequence gets a random rank from the seed and its
index, and the sequences of smallest rank are kept (bottom-k sampling): a uniform sample that need not know how many
candidates there are. It depends only on the seed and the text.
"""

import hashlib
import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from adaattn_hf.errors import UsageError

from .texts import read_documents

Encode = Callable[[str], Sequence[int]]
RUN = 32
"""Tokens in a row that are looked up to tell text that was read before."""
COPIED = 0.5
"""A sequence is a copy if this share of its runs was read before; less is a licence or a heading."""


@dataclass(frozen=True, eq=False)
class TokenWindow:
    """One model input and what is scored in it.

    Attributes:
        document: The document that it was cut from: windows of one are not independent.
        input_ids: `[length]`.
        positions: `[scored]`, the rows of the logits that are scored; None if every row predicts the next token (the
            last one has no target).
        targets: `[scored]`, the token that each of them should predict.
    """

    document: int | str
    input_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64] | None
    targets: npt.NDArray[np.int64]

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """The rows of the logits that have a target."""
        return np.arange(len(self.targets)) if self.positions is None else self.positions

    @property
    def rows_per_prediction(self) -> float:
        """Query rows per scored prediction; converts a loss per row into a loss per predicted token."""
        return 1.0 if self.positions is None else len(self.input_ids) / len(self.positions)


def next_token(tokens: Sequence[int] | npt.NDArray[np.int64]) -> TokenWindow:
    """Returns the window of some tokens in which every one predicts the next."""
    input_ids = np.asarray(tokens, np.int64)
    return TokenWindow("", input_ids, None, input_ids[1:])


def _tail(document: int, input_ids: Sequence[int], targets: Sequence[int]) -> TokenWindow:
    positions = np.arange(len(input_ids) - len(targets), len(input_ids), dtype=np.int64)
    return TokenWindow(document, np.asarray(input_ids, np.int64), positions, np.asarray(targets, np.int64))


def check(context: int, stride: int) -> None:
    """Raise `UsageError` where context and stride do not fit together."""
    if context < 2:
        raise UsageError(f"context: got {context}, expected at least 2 tokens; pass --context 1024, say")
    if not 1 <= stride <= context:
        raise UsageError(
            f"stride: got {stride}, expected 1 to the context, {context}: a larger stride would leave tokens out. "
            f"Pass --stride {context} for disjoint windows or --stride {context // 2} for half-overlapping ones"
        )


def rolling(tokens: Sequence[int], context: int, stride: int, prefix: int, document: int = 0) -> Iterator[TokenWindow]:
    """Windows of `rolling`: all tokens are scored, each once.

    With `stride == context` they are the disjoint windows of lm-evaluation-harness's `loglikelihood_rolling`
    (`get_rolling_token_windows(context_len=1)`); a smaller stride is its `context_len = context - stride + 1`.
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


def strided(tokens: Sequence[int], context: int, stride: int, document: int = 0) -> Iterator[TokenWindow]:
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
) -> Iterator[TokenWindow]:
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
            yield TokenWindow(document, input_ids, position, whole[position])


def continuation(prompt: Sequence[int], target: Sequence[int], context: int, document: int = 0) -> TokenWindow:
    """The window of a last-word item: `target` after `prompt`, cut on the left to `context` input tokens."""
    if not prompt or not target:
        raise ValueError(f"prompt and target: got {len(prompt)} and {len(target)} tokens, expected at least one each")
    if len(target) > context:
        raise UsageError(f"context: got {context}, expected at least the {len(target)} tokens of the last word")
    whole = [*prompt, *target][-(context + 1) :]
    return _tail(document, whole[:-1], target)


def split_passage(passage: str) -> tuple[str, str]:
    """(prompt, target): the passage before its last word, and the space and last word after it."""
    words = passage.split(" ")
    return " ".join(words[:-1]), " " + words[-1]


def causal_window(tokenizer: Any, passage: str, context: int, document: int, prefix: int | None = None) -> TokenWindow:
    """The window of one passage for a causal LM, tokenised as lm-evaluation-harness does.

    The passage is tokenised whole, the prompt alone, and the target is what the whole has beyond the prompt's length.
    """
    prompt, target = split_passage(passage)
    kept = prompt.rstrip()
    target = prompt[len(kept) :] + target
    whole = tokenizer.encode(kept + target, verbose=False)
    head = tokenizer.encode(kept, verbose=False) if kept else []
    if not head:
        whole = tokenizer.encode(target, add_special_tokens=False, verbose=False)
        if prefix is None:
            raise UsageError(
                f"data: passage {document} has nothing before its last word, and no prefix token to put "
                "there; remove the passage or pass --prefix-token"
            )
        head, whole = [prefix], [prefix, *whole]
    return continuation(head, whole[len(head) :], context, document)


def masked_window(
    tokenizer: Any, passage: str, context: int, document: int, first: Sequence[int], last: Sequence[int]
) -> TokenWindow:
    """The window of one passage for a masked LM: all tokens of the last word masked at once.

    `first` and `last` are the special tokens that the tokenizer puts around a text. Where the passage is too
    long, it loses tokens at its beginning.
    """
    prompt, target = split_passage(passage)
    body = tokenizer.encode(prompt.rstrip(), add_special_tokens=False, verbose=False)
    word = tokenizer.encode(target.strip(), add_special_tokens=False, verbose=False)
    if not word:
        raise UsageError(f"data: the last word of passage {document}, {target!r}, gives no token")
    room = context - len(first) - len(last) - len(word)
    if room < 1:
        raise UsageError(f"context: got {context}, expected more than the {len(word)} tokens of passage {document}")
    body = body[-room:]
    input_ids = np.asarray([*first, *body, *[tokenizer.mask_token_id] * len(word), *last], np.int64)
    positions = np.arange(len(first) + len(body), len(first) + len(body) + len(word), dtype=np.int64)
    return TokenWindow(document, input_ids, positions, np.asarray(word, np.int64))


@dataclass(frozen=True)
class TokenSequence:
    """A chunk of text as token ids; chunks of one document are not independent. `source` is as the user gave it."""

    document: str
    tokens: tuple[int, ...]
    source: str = ""


def sequences(
    documents: Iterable[tuple[str, Iterator[str]]], encode: Encode, length: int, digest: Any
) -> Iterator[TokenSequence]:
    """Yields chunks of `length` tokens; short documents are joined, and a chunk is named after its first document.

    All text is added to `digest`, for the fingerprint.
    """
    buffer: list[int] = []
    name = ""
    for document, pieces in documents:
        for piece in pieces:
            digest.update(piece.encode("utf-8", "replace"))
            if not buffer:
                name = document
            buffer.extend(encode(piece))
            while len(buffer) >= length:
                yield TokenSequence(name, tuple(buffer[:length]))
                del buffer[:length]
                name = document


def draw(
    paths: Sequence[str | Path], encode: Encode, length: int, wanted: dict[str, int], seed: int, spare: int = 0
) -> tuple[dict[str, list[TokenSequence]], str]:
    """Returns disjoint uniform samples of `length` tokens, as many for each use as are `wanted`, and the text's hash.

    All sources contribute equally many sequences, as far as they have them, whatever their sizes. `encode` makes token
    ids without special tokens. The last use gets up to `spare` sequences more, as many as the text holds. A text that
    holds fewer than are wanted in all is refused.
    """
    digest, numbers, wanted_in_all = hashlib.sha256(), count(), sum(wanted.values())
    kept: list[list[TokenSequence]] = []

    def rank(index: int) -> bytes:
        return hashlib.sha256(f"{seed}:{length}:{index}".encode()).digest()[:8]

    for path in paths:
        read = sequences(read_documents([path]), encode, length, digest)
        ranked = ((rank(index), index, sequence) for sequence, index in zip(read, numbers, strict=False))
        least = heapq.nsmallest(wanted_in_all + spare, ranked)
        kept.append([replace(sequence, source=str(path)) for *_, sequence in least])
    if (number := next(numbers)) < wanted_in_all:
        raise ValueError(
            f"data: the text holds {number} sequences of {length} tokens, {wanted_in_all} are wanted "
            f"({', '.join(f'{number} for {use}' for use, number in wanted.items())}); give more text or shorter lengths"
        )
    ordered = (one for turn in zip_longest(*kept) for one in turn if one is not None)
    parts = {use: list(islice(ordered, number)) for use, number in wanted.items()}
    parts[[*wanted][-1]] += islice(ordered, spare)
    return parts, digest.hexdigest()


def refuse_copies(used: Iterable[TokenSequence], held_out: Sequence[TokenSequence]) -> None:
    """Refuses held-out sequences most of whose text is in `used`, by which a plan is chosen, under whatever name."""
    runs_read = {run for one in used for run in _runs(one.tokens, 1)}
    copies = [one for one in held_out if np.mean([run in runs_read for run in _runs(one.tokens, RUN)]) > COPIED]
    if copies:
        raise ValueError(
            f"data: {len(copies)} of {len(held_out)} held-out sequences are copies of text that plans are chosen by, "
            f"the first in {copies[0].document}, expected other text; remove what is there twice, or name other "
            "--verify-data"
        )


def _runs(tokens: Sequence[int], step: int) -> Iterator[int]:
    """Yields the hashes of `RUN` tokens in a row, one every `step` tokens."""
    size = min(RUN, len(tokens))
    return (hash(tuple(tokens[start : start + size])) for start in range(0, len(tokens) - size + 1, step))
