"""Samples token sequences of one length from text files, in one pass and with constant memory.

Every candidate sequence gets a random rank from the seed and its index, and the sequences of smallest rank are kept
(bottom-k sampling): a uniform sample that need not know how many candidates there are. The sample depends on the seed
and the text alone.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

CHARS = 1 << 16
"""Characters read and tokenised at a time."""

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class TokenSequence:
    """A chunk of text as tokens.

    Attributes:
        document: Name of the document that it comes from; chunks of one document are not independent.
        tokens: Token ids.
        source: Name of the file or directory, as the user gave it.
    """

    document: str
    tokens: tuple[int, ...]
    source: str = ""


@dataclass(frozen=True)
class Sample:
    """Disjoint sequences for each use.

    Attributes:
        parts: `parts[use]` is a list of sequences.
        fingerprint: Hash of all text read.
        documents: Documents read.
        available: Sequences that could have been drawn.
    """

    parts: dict[str, list[TokenSequence]]
    fingerprint: str
    documents: int
    available: int


def read_documents(paths: Iterable[str | Path]) -> Iterator[tuple[str, Iterator[str]]]:
    """Yields documents as a name and pieces of text: each line of a `.jsonl` file (its field `text`), or a whole file.

    Directories are read file by file in the order of their names.

    Raises:
        FileNotFoundError: If a path does not exist.
        ValueError: If a line of a `.jsonl` has no `text`.
    """
    for path in map(Path, paths):
        if path.is_dir():
            yield from read_documents(sorted(child for child in path.iterdir() if child.is_file()))
        elif not path.exists():
            raise FileNotFoundError(
                f"data: {path} does not exist; expected .txt or .jsonl files or directories of them"
            )
        elif path.suffix == ".jsonl":
            with path.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines):
                    record = json.loads(line)
                    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
                        raise ValueError(f"data: {path} line {number + 1} has no string field 'text'")
                    yield f"{path.name}:{number}", iter([record["text"]])
        else:
            yield path.name, _pieces(path)


def _pieces(path: Path) -> Iterator[str]:
    """Yields pieces of a file that end at a line break, so that few tokens span two pieces."""
    with path.open(encoding="utf-8", errors="replace") as file:
        rest = ""
        while piece := file.read(CHARS):
            text = rest + piece
            cut = text.rfind("\n") + 1 or len(text)
            rest = text[cut:]
            yield text[:cut]
        if rest:
            yield rest


def sequences(
    documents: Iterable[tuple[str, Iterator[str]]], encode: Encode, length: int, seen: Callable[[str], None]
) -> Iterator[TokenSequence]:
    """Yields chunks of `length` tokens; short documents are joined, and a chunk is named after its first document.

    Args:
        documents: Names and pieces of text.
        encode: Text to token ids, without special tokens.
        length: Tokens per chunk.
        seen: Called with every piece of text, for the fingerprint.
    """
    buffer: list[int] = []
    name = ""
    for document, pieces in documents:
        for piece in pieces:
            seen(piece)
            if not buffer:
                name = document
            buffer.extend(encode(piece))
            while len(buffer) >= length:
                yield TokenSequence(name, tuple(buffer[:length]))
                del buffer[:length]
                name = document


def draw(
    paths: Sequence[str | Path],
    encode: Encode,
    length: int,
    wanted: dict[str, int],
    seed: int,
    spare: int = 0,
) -> Sample:
    """Returns disjoint uniform samples of sequences of `length` tokens for each use.

    All sources contribute equally many sequences, as far as they have them, whatever their sizes.

    Args:
        paths: Files and directories of text.
        encode: Text to token ids, without special tokens.
        length: Tokens per sequence.
        wanted: Sequences wanted per use.
        seed: Seed of the sample.
        spare: Further sequences for the last of the uses, as many as the text holds.

    Raises:
        ValueError: If the text holds fewer sequences than are wanted in all.
    """
    digest = hashlib.sha256()
    count = sum(wanted.values())
    names: set[str] = set()
    kept: dict[str, list[tuple[int, int, TokenSequence]]] = {}
    index = 0

    def note(piece: str) -> None:
        digest.update(piece.encode("utf-8", "replace"))

    def named(path: str | Path) -> Iterator[tuple[str, Iterator[str]]]:
        for name, pieces in read_documents([path]):
            names.add(name)
            yield name, pieces

    for path in paths:
        heap = kept.setdefault(str(path), [])
        for sequence in sequences(named(path), encode, length, note):
            rank = int.from_bytes(hashlib.sha256(f"{seed}:{length}:{index}".encode()).digest()[:8], "big")
            item = (-rank, index, replace(sequence, source=Path(path).name))
            index += 1
            if len(heap) < count + spare:
                heapq.heappush(heap, item)
            elif item > heap[0]:
                heapq.heapreplace(heap, item)
    available = index
    if available < count:
        raise ValueError(
            f"data: the text holds {available} sequences of {length} tokens, {count} are wanted "
            f"({', '.join(f'{number} for {use}' for use, number in wanted.items())}); give more text or shorter lengths"
        )
    by_rank = [
        [sequence for _, _, sequence in sorted(heap, key=lambda item: -item[0])] for heap in kept.values()
    ]
    ordered = [one for turn in zip_longest(*by_rank) for one in turn if one is not None]
    parts: dict[str, list[TokenSequence]] = {}
    start = 0
    for use, number in wanted.items():
        parts[use] = ordered[start : start + number]
        start += number
    if spare:
        parts[use] += ordered[start : start + spare]
    return Sample(parts, digest.hexdigest(), len(names), available)
