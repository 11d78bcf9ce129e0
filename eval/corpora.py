"""Where the text comes from: WikiText, LAMBADA or a user's files, local or through `datasets`."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from adaattn_hf.errors import DataUnavailable

from . import wikitext
from .texts import json_lines, pieces, text_files, text_of

Kind = Literal["pages", "lastword"]

HUB = {"wikitext": ("Salesforce/wikitext", "wikitext-2-raw-v1"), "lambada": ("EleutherAI/lambada_openai", "default")}
"""Known corpora: repository and configuration of each."""


@dataclass(frozen=True)
class Document:
    """One text. `source` is what words and bytes are counted in, `text` what the model reads."""

    text: str
    source: str

    @property
    def words(self) -> int:
        """Words of `source` by lm-evaluation-harness's rule."""
        return wikitext.count_words(self.source)

    @property
    def bytes(self) -> int:
        """Bytes of `source` in UTF-8."""
        return len(self.source.encode("utf-8"))


@dataclass(frozen=True)
class Corpus:
    """Documents, the way in which they are scored, and where they came from."""

    name: str
    kind: Kind
    documents: tuple[Document, ...]
    origin: str
    sha256: str = field(init=False)

    def __post_init__(self) -> None:
        if not self.documents:
            raise DataUnavailable(f"data: got {self.origin}, which holds no text, expected at least one document")
        digest = hashlib.sha256()
        for document in self.documents:
            for part in (document.source, document.text):
                raw = part.encode("utf-8")
                digest.update(len(raw).to_bytes(8, "little") + raw)
        object.__setattr__(self, "sha256", digest.hexdigest())

    def head(self, documents: int | None) -> Self:
        """The first so many documents (all with `None`)."""
        if documents is None or documents >= len(self.documents):
            return self
        return replace(self, documents=self.documents[:documents])


def wikitext_corpus(pages: Iterable[str], origin: str, name: str = "wikitext") -> Corpus:
    """A corpus of pages that are counted and detokenised by WikiText's rules."""
    return Corpus(name, "pages", tuple(Document(wikitext.detokenize(page), page) for page in pages), origin)


def lastword_corpus(passages: Iterable[str], origin: str, name: str = "lambada") -> Corpus:
    """A corpus of passages whose last word is to be said (LAMBADA, OpenAI's processing)."""
    documents = []
    for i, passage in enumerate(passages):
        if " " not in passage.strip():
            raise DataUnavailable(
                f"data: got passage {i} of {origin}, {passage!r}, expected at least two words: "
                "the last one is predicted from the others"
            )
        documents.append(Document(passage, passage))
    return Corpus(name, "lastword", tuple(documents), origin)


def text_corpus(texts: Iterable[str], origin: str, name: str) -> Corpus:
    """A corpus of plain texts, read as they are."""
    return Corpus(name, "pages", tuple(Document(text, text) for text in texts if text.strip()), origin)


def local(spec: str) -> tuple[str, Path]:
    """The corpus in whose form a file or directory is, empty for plain text, and its path; DataUnavailable if none."""
    corpus, _, where = spec.partition(":")
    corpus, path = (corpus, Path(where)) if corpus in HUB else ("", Path(spec))
    try:
        if spec and path.exists():
            return corpus, path
    except OSError as error:  # a name that is too long, or a directory that may not be entered
        raise DataUnavailable(f"data: cannot read {path}: {error.strerror}") from error
    if corpus:
        raise DataUnavailable(
            f"data: got {corpus}:{path}, which does not exist, expected a file or directory; correct the "
            f"path, or pass --data {corpus} to have it through the package datasets"
        )
    raise DataUnavailable(
        f"data: got {spec!r}, which is no file or directory here, expected {', '.join(HUB)}, a path, or "
        f"wikitext:PATH or lambada:PATH. Give the path of a text file, or of a .jsonl with a field 'text'"
    )


def refuse_missing(specs: Iterable[str]) -> None:
    """Refuses (DataUnavailable) files that are not there: at once, before the Hub is waited for or weights are read."""
    for spec in specs:
        if spec not in HUB:
            local(spec)


def load(spec: str, *, split: str = "test") -> Corpus:
    """The corpus that one `--data` argument names; DataUnavailable where it is not to be had, or cannot be read.

    `spec` is `wikitext` or `lambada` (a `split` from the hub or the local cache of `datasets`); `wikitext:PATH` or
    `lambada:PATH` (a file, or a directory of files, in that corpus's form); or the path of a text or `.jsonl` file, or
    of a directory of them.
    """
    corpus, path = ("", Path()) if spec in HUB else local(spec)
    whole = Path(os.path.realpath(path))  # which takes links that lead to themselves as they are
    origin = whole.name  # the name alone: a report speaks of data, not of one machine's directories
    try:
        if spec in HUB:
            return _from_hub(spec, split)
        if corpus == "lambada":
            return lastword_corpus(_texts(path, lines=True), origin)
        if corpus == "wikitext":
            return wikitext_corpus((page for file in text_files(path) for page in _pages_of(file)), origin)
        return text_corpus(_texts(path), origin, whole.stem)
    except OSError as error:
        raise DataUnavailable(f"data: cannot read {error.filename or path}: {error.strerror or error}") from error
    except ValueError as error:
        raise DataUnavailable(str(error)) from error


def _from_hub(corpus: str, split: str) -> Corpus:
    try:
        import datasets
    except ImportError as error:
        raise DataUnavailable(
            f"data: {corpus} comes through the package datasets, which is not installed; pip install datasets, or give "
            "a text of your own: --data FILE.txt"
        ) from error
    repository, configuration = HUB[corpus]
    try:
        rows = datasets.load_dataset(repository, configuration, split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        raise DataUnavailable(
            f"data: {corpus} is neither in the local cache of datasets nor to be downloaded ({repository}: {reason}). "
            f"Connect to the hub once, or name a local file: --data {corpus}:PATH"
        ) from error
    origin = f"{repository} ({configuration}) {split}"
    if corpus == "lambada":
        return lastword_corpus((row["text"] for row in rows), origin)
    return wikitext_corpus(_pages(rows, repository), origin)


def _pages(rows: Iterable[dict[str, Any]], where: str) -> Iterator[str]:
    listed = list(rows)
    whole = bool(listed) and isinstance(listed[0], dict) and "page" in listed[0]
    texts = [text_of(row, f"data: row {i + 1} of {where}", ("page", "text")) for i, row in enumerate(listed)]
    yield from texts if whole else wikitext.split_pages(wikitext.join_rows(texts))


def _pages_of(file: Path) -> Iterator[str]:
    """The pages of a file of WikiText: raw text, or rows of pages or of lines."""
    if file.suffix.lower() == ".jsonl":
        return _pages((row for _, row in json_lines(file)), str(file))
    return wikitext.split_pages("".join(pieces(file)))


def _texts(path: Path, lines: bool = False) -> Iterator[str]:
    """The text of each document; with `lines`, each line of a plain text file is one."""
    for file in text_files(path):
        if file.suffix.lower() == ".jsonl":
            for number, row in json_lines(file):
                yield text_of(row, f"data: {file} line {number + 1}", ("text", "page"))
            continue
        text = "".join(pieces(file))
        if lines:
            yield from (line for line in text.split("\n") if line.strip())
        else:
            yield text
