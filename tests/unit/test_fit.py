"""Lengths and folds that a text can fill, by the tokenizer alone; what `adaattn calibrate` takes by default."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adaattn_cli.commands import CALIBRATE
from adaattn_cli.fit import LENGTHS, count_tokens, fit_to_text
from adaattn_cli.job import Job, job_of
from adaattn_cli.options import share
from adaattn_hf.calibration.inputs import LEAST_HELD_OUT
from adaattn_hf.calibration.settings import CalibrationSettings

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
    return job_of(CALIBRATE(model=model, **asked), Path("plan"), [Path("plan")])


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
