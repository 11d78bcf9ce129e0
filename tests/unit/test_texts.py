"""Texts as people have them, which calibration and evaluation read alike; what a text has room for."""

import bz2
import gzip
import json
import lzma
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adaattn_cli.commands import CALIBRATE
from adaattn_cli.job import LENGTHS, Job, count_tokens, directories, fit_to_text, job_of
from adaattn_cli.options import share
from adaattn_hf.calibration.inputs import LEAST_HELD_OUT
from adaattn_hf.calibration.settings import CalibrationSettings
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
    ("old.txt", "caf\u00e9".encode("latin-1"), r"cannot read .*old\.txt as UTF-8 text .*iconv"),
    ("old.jsonl", '{"text": "caf\u00e9"}'.encode("latin-1"), r"cannot read .*old\.jsonl as UTF-8 text .*iconv"),
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


SETTINGS = CalibrationSettings(sequences=4, joint=3, held_out=24)
OWN = SETTINGS.sequences + SETTINGS.joint


def encode(text: str) -> list[int]:
    return [0] * len(text.split())


def text(path: Path, tokens: int) -> Path:
    path.write_text("\n\n".join("word " * 100 for _ in range(tokens // 100)), encoding="utf-8")
    return path


@pytest.fixture
def book(tmp_path: Path) -> Path:
    return tmp_path / "book.txt"


def test_counting_stops_where_it_is_enough(book: Path) -> None:
    text(book, 5000)
    assert count_tokens([book], encode, 10**9) == 5000
    asked: list[str] = []

    def counted(piece: str) -> list[int]:
        asked.append(piece)
        return encode(piece)

    assert 300 <= count_tokens([book], counted, 300) < 5000
    assert sum(len(encode(piece)) for piece in asked) < 5000


@pytest.mark.parametrize(
    "held", [24, 12, LEAST_HELD_OUT], ids=["as many as are asked for", "half as many", "as few as will do"]
)
def test_the_longest_length_that_the_text_can_prove_is_taken(book: Path, held: int) -> None:
    """A text that just fills a length with so many held-out sequences takes the longest length with as many."""
    tokens = math.ceil((OWN + held) * 512 / 100) * 100
    fitted, sentence = fit_to_text(SETTINGS, encode, [text(book, tokens)], None, None)
    room = tokens // fitted.lengths[0] - OWN
    assert room >= 24, "a shorter length holds as many as are asked for"
    longer = [one for one in LENGTHS if one > fitted.lengths[0]]
    assert all(tokens // one - OWN < 24 for one in longer)
    assert sentence == f"text: {OWN} sequences of {fitted.lengths[0]:,} tokens to choose the plan, 24 to verify it"
    assert (fitted.lengths == (512,)) == (held == 24)


def test_a_short_text_makes_do_with_fewer_held_out_sequences(book: Path) -> None:
    tokens = (OWN + LEAST_HELD_OUT) * LENGTHS[-1] // 100 * 100 + 100
    fitted, sentence = fit_to_text(SETTINGS, encode, [text(book, tokens)], None, None)
    assert fitted.lengths == (LENGTHS[-1],)
    assert sentence.endswith(f"choose the plan, {LEAST_HELD_OUT} to verify it")
    with pytest.raises(ValueError, match=r"data: \d+ tokens of text, expected at least 1664 for sequences of 128"):
        fit_to_text(SETTINGS, encode, [text(book, tokens - 200)], None, None)


def test_held_out_text_of_its_own_leaves_the_other_to_choose_by(book: Path, tmp_path: Path) -> None:
    other = text(tmp_path / "other.txt", 24 * 1024 + 100)
    data = text(book, OWN * 1024 + 100)
    fitted, sentence = fit_to_text(SETTINGS, encode, [data], [other], None)
    assert fitted.lengths == (1024,)
    assert sentence.endswith("24 to verify it")
    alone, _ = fit_to_text(SETTINGS, encode, [data], None, None)
    assert alone.lengths[0] < 1024
    with pytest.raises(ValueError, match="and 100 held out"):
        fit_to_text(SETTINGS, encode, [data], [text(tmp_path / "scrap.txt", 100)], None)


def test_no_length_is_beyond_the_positions_of_the_model(book: Path) -> None:
    text(book, 60 * 700)
    assert fit_to_text(SETTINGS, encode, [book], None, 700)[0].lengths == (700,)
    assert fit_to_text(SETTINGS, encode, [book], None, 100)[0].lengths == (100,)
    few = replace(SETTINGS, held_out=4)
    assert fit_to_text(few, encode, [book], None, 700)[0].held_out == 4


def job(model: str | None = None, **asked: Any) -> Job:
    return job_of(options := CALIBRATE(model=model, **asked), Path("plan"), directories(options))


def test_a_job_is_of_what_was_named_or_of_what_is_packaged(tmp_path: Path) -> None:
    packaged = job()
    assert packaged.settings == replace(SETTINGS, budget=math.log1p(0.01))
    assert all(path.exists() for path in (Path(packaged.model), *packaged.data, *(packaged.verify_data or ())))
    named = job("m", data=(tmp_path,), lengths=(64, 128))
    assert (named.model, named.data, named.verify_data) == ("m", (tmp_path,), None)
    assert named.settings == replace(SETTINGS, budget=math.log1p(0.001), lengths=(64, 128))
    own = job(data=(tmp_path,), verify_data=(tmp_path,), budget=("2e-3",))
    assert (own.data, own.verify_data, own.settings.budget) == ((tmp_path,), (tmp_path,), 2e-3)
    with pytest.raises(ValueError, match="data is absent"):
        job("m")


@pytest.mark.parametrize(("text", "value"), [("99%", 0.99), (" 0.99 ", 0.99), ("0.4x", 0.4)])
def test_a_share_is_read_as_people_write_it(text: str, value: float) -> None:
    assert share(text, "top1") == pytest.approx(value)
    with pytest.raises(ValueError, match=r"top1 is 'x9', expected a share such as 99%"):
        share("x9", "top1")
