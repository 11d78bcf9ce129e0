"""Reads text as people have it: which files hold some, what they hold, and why a file cannot be read.

Calibration and evaluation read alike. Whatever is not plain text in UTF-8 is refused with the way to make it so: read
with marks in the place of what is not understood, it would be measured as other text.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

CHARS = 1 << 16
"""Characters read and tokenised at a time."""
ENCODING = "utf-8-sig"
"""UTF-8, without the mark that some editors put in front."""
TEXT_SUFFIXES = (".txt", ".md", ".raw", ".tokens", ".text")
"""What plain text is called in a directory; a file that is named by itself may be called otherwise."""
TABLES = (".json", ".parquet", ".csv", ".arrow", ".tsv", ".xls", ".xlsx", ".ods", ".feather", ".npy")
"""Tables are not read: as plain text their separators and numbers would be measured."""
_SURROGATE = re.compile("[\ud800-\udfff]")
"""Escapes of JSON can write halves of characters, which have no form in UTF-8."""
UTF_16, UTF_32 = "iconv -f UTF-16 -t UTF-8", "iconv -f UTF-32 -t UTF-8"
MAGIC: tuple[tuple[bytes, str, str], ...] = (
    (b"\x1f\x8b", "compressed by gzip", "gunzip"),
    (b"BZh", "compressed by bzip2", "bunzip2"),
    (b"\xfd7zXZ\x00", "compressed by xz", "unxz"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd", "unzstd"),
    (b"PK\x03\x04", "a zip archive, as office documents are", "unzip, or save it as plain text"),
    (b"%PDF-", "a PDF", "pdftotext"),
    (b"\xff\xfe\x00\x00", "text in UTF-32", UTF_32),
    (b"\x00\x00\xfe\xff", "text in UTF-32", UTF_32),
    (b"\xff\xfe", "text in UTF-16", UTF_16),
    (b"\xfe\xff", "text in UTF-16", UTF_16),
)
"""First bytes of files that are often given for text: what they are, and what makes text of them."""


def text_files(path: Path) -> list[Path]:
    """Returns the file of a path, or the text and `.jsonl` files in a directory and in those below it, by their names.

    A path that does not exist is refused, a directory without such a file, a pipe or a device, and a table.
    """
    if path.is_dir():
        suffixes = (*TEXT_SUFFIXES, ".jsonl")
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in suffixes and file.is_file())
        if not files:
            raise ValueError(f"data: the directory {path} holds no text, expected files named {', '.join(suffixes)}")
        return files
    if not path.exists():
        raise FileNotFoundError(f"data: {path} does not exist; expected .txt or .jsonl files or directories of them")
    if not path.is_file():
        raise ValueError(
            f"data: got {path}, a pipe or device, which is read but once; expected a file or a directory of them"
        )
    if path.suffix.lower() in TABLES:
        raise ValueError(
            f"data: {path} is a table, expected plain text or a .jsonl with a field 'text'; write its texts as one"
        )
    return [path]


BINARY = (
    "data: {} is a binary file (it holds zero bytes), expected text in UTF-8: .txt or .jsonl files or directories of "
    "them; convert it, or leave it out"
)


def refuse_repeats(data: Iterable[str | Path], verify_data: Iterable[str | Path] | None) -> None:
    """Refuses a file that is named twice: a plan would be verified on the text that it was chosen by."""
    named: dict[Path, str] = {}
    for argument, paths in (("data", data), ("verify_data", verify_data or ())):
        for path in paths:
            for file in text_files(Path(path)):
                real = file.resolve()
                if real in named:
                    raise ValueError(
                        f"{argument}: {file} is named twice, in {named[real]} and in {argument} {path}, expected each "
                        "text once: a plan is not verified on text that it was chosen by, nor by one text counted "
                        "twice; leave it out of one of them"
                    )
                named[real] = f"{argument} {path}"


def read_documents(paths: Iterable[str | Path]) -> Iterator[tuple[str, Iterator[str]]]:
    """Yields documents as a name and pieces of text: each line of a `.jsonl` file (its field `text`), or a whole file.

    Directories are read file by file in the order of their names, with the directories below them. A file that is no
    text in UTF-8 is refused, and a line of a `.jsonl` without a `text`.
    """
    for path in map(Path, paths):
        for file in text_files(path):
            if file.suffix.lower() == ".jsonl":
                for number, record in json_lines(file):
                    yield f"{file}:{number}", iter([text_of(record, f"data: {file} line {number + 1}")])
            else:
                yield str(file), pieces(file)


def json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yields the number of each line that is not blank, from 0, and its JSON; refuses other lines."""
    for number, line in enumerate(pieces(path, lines=True)):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"data: {path} line {number + 1} is not JSON: {error}") from error


def text_of(record: Any, where: str, fields: tuple[str, ...] = ("text",)) -> str:
    """Returns the text of a record: the first of those fields that it has, which must be a string."""
    named = " or ".join(map(repr, fields))
    if not isinstance(record, Mapping):
        raise ValueError(f"{where} is {_kind(record)}, expected an object with the text field {named}")
    for name in fields:
        if name in record:
            if isinstance(text := record[name], str):
                if _SURROGATE.search(text):
                    raise ValueError(
                        f"{where}: its field {name!r} holds half of a character (an escape such as \\ud800), expected "
                        "text in Unicode; leave the line out, or write the character whole"
                    )
                return text
            raise ValueError(
                f"{where}: its field {name!r} is {_kind(record[name])}, expected a string; leave the line out, or give "
                "it text"
            )
    raise ValueError(
        f"{where} has {', '.join(map(repr, sorted(map(str, record)))) or 'no fields'}, expected the text field "
        f"{named}; rename the field that holds the text"
    )


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "a string",
             list: "a list", dict: "an object"}  # fmt: skip
    return names.get(type(value), type(value).__name__)


def pieces(path: Path, lines: bool = False) -> Iterator[str]:
    """Yields the lines of a file in UTF-8, or pieces that end at a line break, so that few tokens span two pieces."""
    with path.open("rb") as file:
        head = file.read(256)
    # without a mark in front, every other byte of what is written in Latin letters is zero, and only those
    zeros = head[0::2].count(0), head[1::2].count(0)
    unmarked = max(zeros) > len(head) // 4 and min(zeros) == 0
    guess = (b"", "text in UTF-16", f"iconv -f UTF-16{'BE' if zeros[0] else 'LE'} -t UTF-8")
    for magic, what, remedy in (*MAGIC, *([guess] if unmarked else [])):
        if head.startswith(magic):
            raise ValueError(f"data: {path} is {what}, expected plain text in UTF-8; convert it first: {remedy}")
    if b"\0" in head:
        raise ValueError(BINARY.format(path))
    try:
        with path.open(encoding=ENCODING) as text_file:
            if lines:
                yield from text_file
                return
            rest = ""
            while piece := text_file.read(CHARS):
                if "\0" in piece:
                    raise ValueError(BINARY.format(path))
                text = rest + piece
                cut = text.rfind("\n") + 1 or len(text)
                rest = text[cut:]
                yield text[:cut]
            if rest:
                yield rest
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data: cannot read {path} as UTF-8 text ({error}); save it in UTF-8: iconv -f LATIN1 -t UTF-8, say"
        ) from error
