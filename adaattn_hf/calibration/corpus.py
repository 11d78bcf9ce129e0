"""Samples token sequences of one length from text files, in one pass and with constant memory.

Every candidate sequence gets a random rank from the seed and its index, and the sequences of smallest rank are kept
(bottom-k sampling): a uniform sample that need not know how many candidates there are. The sample depends only on
the seed and the text.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from .texts import read_documents

RUN = 32
"""Tokens in a row that are looked up to tell text that was read before."""
COPIED = 0.5
"""A sequence is a copy if this share of its runs was read before; less is a licence or a heading."""
Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class TokenSequence:
    """A chunk of text as token ids; chunks of one document are not independent. `source` is as the user gave it."""

    document: str
    tokens: tuple[int, ...]
    source: str = ""


@dataclass(frozen=True)
class Sample:
    """Disjoint sequences, `parts[use]` for each use, and a hash of all text read."""

    parts: dict[str, list[TokenSequence]]
    fingerprint: str


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
) -> Sample:
    """Returns disjoint uniform samples of sequences of `length` tokens, as many for each use as are `wanted`.

    All sources contribute equally many sequences, as far as they have them, whatever their sizes. `encode` makes token
    ids without special tokens. The last use gets up to `spare` sequences more, as many as the text holds. A text that
    holds fewer than are wanted in all is refused.
    """
    digest, numbers, wanted_in_all = hashlib.sha256(), count(), sum(wanted.values())
    kept: list[list[TokenSequence]] = []

    def rank(index: int) -> bytes:
        return hashlib.sha256(f"{seed}:{length}:{index}".encode()).digest()[:8]

    for path in paths:
        found = sequences(read_documents([path]), encode, length, digest)
        ranked = ((rank(index), index, sequence) for sequence, index in zip(found, numbers, strict=False))
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
    return Sample(parts, digest.hexdigest())


def refuse_copies(own: Iterable[TokenSequence], held_out: Sequence[TokenSequence]) -> None:
    """Refuses held-out sequences most of whose text is in `own`, by which a plan is chosen, under whatever name."""
    known = {run for one in own for run in _runs(one.tokens, 1)}
    copies = [one for one in held_out if np.mean([run in known for run in _runs(one.tokens, RUN)]) > COPIED]
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
