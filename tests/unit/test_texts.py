"""Texts as people have them: encodings, line ends, directories; calibration and evaluation read them alike."""

import bz2
import gzip
import json
import lzma
from pathlib import Path

import pytest

from adaattn_hf.errors import DataUnavailable
from adaattn_hf.eval import corpora
from adaattn_hf.eval.texts import CHARS, read_documents, refuse_repeats


def calibrated(path: Path) -> list[str]:
    return ["".join(pieces) for _, pieces in read_documents([path])]


def evaluated(path: Path) -> list[str]:
    return [document.text for document in corpora.load(str(path)).documents]


@pytest.mark.parametrize(("name", "content", "expected"), [
    ("marked.txt", "\ufeffone\ntwo\n", ["one\ntwo\n"]), ("windows.txt", "one\r\ntwo\r\n", ["one\ntwo\n"]),
    ("LOUD.TXT", "one", ["one"]), ("noted", "one", ["one"]),
    ("line.txt", "word " * CHARS, ["word " * CHARS]),
    ("marked.jsonl", '\ufeff{"text": "one"}\r\n{"text": "two"}\r\n', ["one", "two"]),
    ("gaps.jsonl", '\n{"text": "one"}\n\n  \n{"text": "two"}', ["one", "two"]),
    ("web.jsonl", '{"text": "one\u2028two\x85three"}\n', ["one\u2028two\x85three"]),
    ("LOUD.JSONL", '{"text": "one"}\n', ["one"]),
])  # fmt: skip
def test_a_file_is_read_alike(tmp_path: Path, name: str, content: str, expected: list[str]) -> None:
    path = tmp_path / name
    path.write_bytes(content.encode("utf-8"))
    assert calibrated(path) == evaluated(path) == expected


def test_a_directory_is_read_alike_with_those_below_it(tmp_path: Path) -> None:
    for name in ("b.txt", "a/b.txt", "a/c/d.md", "e.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{json.dumps({'text': name})}\n" * 2 if name.endswith("jsonl") else name)
    (tmp_path / ".DS_Store").write_bytes(b"\x00\xff")
    (tmp_path / "a" / "picture.png").write_bytes(b"\x89PNG")
    expected = ["a/b.txt", "a/c/d.md", "b.txt", "e.jsonl", "e.jsonl"]
    assert calibrated(tmp_path) == evaluated(tmp_path) == expected
    names = [name for name, _ in read_documents([tmp_path])]
    documents = ["a/b.txt", "a/c/d.md", "b.txt", "e.jsonl:0", "e.jsonl:1"]
    assert names == [str(tmp_path / name) for name in documents], "files of one name are two documents"


@pytest.mark.parametrize("name", ["old.txt", "old.jsonl"])
def test_other_encodings_are_refused_with_the_remedy(tmp_path: Path, name: str) -> None:
    """Not read with marks in the place of what is not understood: a plan would be proved on other text."""
    path = tmp_path / name
    path.write_bytes('{"text": "caf\u00e9"}\n'.encode("latin-1"))
    for read, error in ((calibrated, ValueError), (evaluated, DataUnavailable)):
        with pytest.raises(error, match=rf"cannot read .*{name} as UTF-8 text .*iconv"):
            read(path)


@pytest.mark.parametrize(("name", "content", "words"), [
    ("null.jsonl", b'{"text": "one"}\n{"text": null}\n', r"null\.jsonl.*field 'text' is null, expected a string"),
    ("number.jsonl", b'{"text": 7}\n', "field 'text' is a number, expected a string"),
    ("list.jsonl", b'["one"]\n', "is a list, expected an object with the text field 'text'"),
    ("other.jsonl", b'{"body": "one"}\n', "has 'body', expected the text field 'text'.*rename"),
    ("marked.txt", "one two".encode("utf-16"), "is text in UTF-16, expected .* iconv -f UTF-16 -t UTF-8"),
    ("rows.jsonl", '{"text": "one"}'.encode("utf-16"), "is text in UTF-16, .* iconv -f UTF-16 "),
    ("little.txt", "one two".encode("utf-16-le"), "is text in UTF-16, .* iconv -f UTF-16LE"),
    ("big.txt", "one two".encode("utf-16-be"), "is text in UTF-16, .* iconv -f UTF-16BE"),
    ("wide.txt", "one two".encode("utf-32"), "is text in UTF-32, .* iconv -f UTF-32"),
    ("one.txt.gz", gzip.compress(b"one two", mtime=0), "is compressed by gzip, .*: gunzip"),
    ("rows.jsonl.gz", gzip.compress(b'{"text": "one"}', mtime=0), "is compressed by gzip, .*: gunzip"),
    ("one.txt.xz", lzma.compress(b"one two"), "is compressed by xz, .*: unxz"),
    ("one.txt.bz2", bz2.compress(b"one two"), "is compressed by bzip2, .*: bunzip2"),
    ("one.pdf", b"%PDF-1.7\n", "is a PDF, .*: pdftotext"),
    ("model.safetensors", b'\x98;\0\0\0\0\0\0{"lm_head": \xff\xfe}', "is a binary file .* expected text in UTF-8"),
    ("model.bin", bytes(64), "is a binary file"),
    ("late.txt", b"one " * CHARS + b"\0", "holds zero bytes"),
    ("rows.tsv", b"text\tlabel\none\t1\n", "is a table, expected plain text or a .jsonl"),
])  # fmt: skip
def test_what_is_no_plain_text_is_refused_with_the_way_to_make_it_so(
    tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    for read, error in ((calibrated, ValueError), (evaluated, DataUnavailable)):
        with pytest.raises(error, match=words):
            read(path)


def test_a_page_of_wikitext_that_is_null_is_named(tmp_path: Path) -> None:
    path = tmp_path / "pages.jsonl"
    path.write_text('{"page": "one"}\n{"page": null}\n')
    with pytest.raises(DataUnavailable, match=r"row 2 of .*pages\.jsonl.*field 'page' is null"):
        corpora.load(f"wikitext:{path}")


@pytest.mark.parametrize(("line", "says"), [
    ('{"text": ', "is not JSON"), ("[" * 200_000, "is not JSON"), (f'{{"n": {"1" * 5000}}}', "is not JSON"),
    (r'{"text": "a \ud83d b"}', "holds half of a character"),
], ids=["cut", "deep", "long", "half"])  # fmt: skip
def test_a_wrong_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"text": "\\ud83d\\ude00"}}\n{line}\n')
    for read, error in ((calibrated, ValueError), (evaluated, DataUnavailable)):
        with pytest.raises(error, match=rf"(line|row) 2.*{says}"):
            read(path)


def test_calibration_refuses_tables_and_directories_without_text(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("text\none\n")
    with pytest.raises(ValueError, match=r"rows\.csv is a table, expected .*\.jsonl"):
        refuse_repeats([tmp_path / "rows.csv"], None)
    with pytest.raises(ValueError, match="holds no text, expected files named"):
        refuse_repeats([tmp_path], None)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        refuse_repeats([tmp_path / "none.txt"], None)
