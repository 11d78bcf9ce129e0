"""What a proof speaks of: held-out text of several sources, that nothing was chosen by, and that is counted once."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from adaattn_hf.calibration.inputs import _draw, each_source
from adaattn_hf.calibration.proof import Evidence
from adaattn_hf.calibration.settings import CalibrationSettings
from adaattn_hf.eval.texts import refuse_repeats
from adaattn_hf.eval.windows import RUN, TokenSequence, draw, refuse_copies

from ..support.calibration import open_inputs
from ..support.letters import encode, lettered_llama, random_letters

BUDGET, LEVEL, EACH = 1e-3, 0.05, 12


def evidence(means: tuple[float, float], random: np.random.Generator, *, apart: bool) -> Evidence:
    both = [(source, mean, place) for source, mean in zip("ab", means, strict=True) for place in range(EACH)]
    read = [TokenSequence(f"{source}{place}", (), source) for source, _, place in both]
    sums = [1000 * (mean + 3e-4 * random.standard_t(5)) for _, mean, _ in both]
    return Evidence(read, sums, [1000] * len(read), np.zeros(1), 0, apart=apart)


def passes(means: tuple[float, float], *, apart: bool, draws: int = 2000) -> float:
    random = np.random.default_rng(0)
    uppers = [evidence(means, random, apart=apart).worst(1.0 - LEVEL).upper(1.0 - LEVEL) for _ in range(draws)]
    return float(np.mean(np.array(uppers) <= BUDGET))


def test_a_plan_that_breaks_the_budget_on_one_source_hardly_ever_passes() -> None:
    beyond = (0.0, 1.001 * BUDGET)
    assert passes(beyond, apart=True) <= LEVEL
    assert passes(beyond, apart=False) > 0.9, "the mean of the sources keeps the budget"
    assert passes((0.0, 0.5 * BUDGET), apart=True) > 0.9


def test_the_bound_is_that_of_the_worst_source() -> None:
    both = evidence((0.0, 1e-3), np.random.default_rng(1), apart=True)
    later = {name: getattr(both, name)[EACH:] for name in ("sequences", "sums", "tokens")}
    alone = replace(both, **later, apart=False)
    assert both.worst(0.95) == alone.worst(0.95)


def test_held_out_sequences_take_turns_as_long_as_every_source_has_one(tmp_path: Path) -> None:
    for name, pages in (("long", 30), ("short", 3)):
        record = json.dumps({"text": "x" * 64}) + "\n"
        (tmp_path / f"{name}.jsonl").write_text(record * pages, encoding="utf-8")
    paths = [tmp_path / "long.jsonl", tmp_path / "short.jsonl"]
    settings = CalibrationSettings(lengths=(64,), sequences=1, joint=1, held_out=8)
    parts, _ = _draw(paths[:1], paths, lambda text: [1] * len(text), 64, settings)
    long, short = map(str, paths)
    assert [one.source for one in parts["held_out"]] == [long, short] * 3
    few = [TokenSequence("d", (1,), long)] * 4 + [TokenSequence("d", (1,), short)]
    with pytest.raises(ValueError, match=r"short\.jsonl holds 1 sequences of 64 tokens, expected at least 2"):
        each_source(few, paths, 64, "verify_data")


def test_two_sources_of_one_name_are_two(tmp_path: Path) -> None:
    """`prose/test.txt` and `code/test.txt` were pooled, and a plan could pass that broke the budget on one of them."""
    paths = [tmp_path / name / "test.txt" for name in ("prose", "code")]
    for path in paths:
        path.parent.mkdir()
        path.write_text(path.parent.name * 100, encoding="utf-8")
    held = draw(paths, encode, 32, {"held_out": 4}, 0)[0]["held_out"]
    assert [one.source for one in each_source(held, paths, 32, "verify_data")] == [*map(str, paths)] * 2
    apart = [replace(one, document=name) for one, name in zip(held, "abcd", strict=True)]
    evidence = Evidence(apart, [0.0, 2.0, 0.0, 2.0], [1000] * 4, np.zeros(1), 0, apart=True)
    assert evidence.worst(0.95).mean == pytest.approx(2e-3), "the worse of both, not their mean"


def test_every_look_has_two_sequences_of_every_source(tmp_path: Path) -> None:
    """One has no spread: its bound is infinite, and a verdict that holds it cannot be written."""
    paths = [random_letters(tmp_path / f"{name}.txt") for name in range(4)]
    for number, path in enumerate(paths):
        path.write_text(path.read_text(encoding="utf-8")[1500 * number :][:1400], encoding="utf-8")
    settings = CalibrationSettings(lengths=(64,), sequences=1, joint=1, held_out=5)
    with pytest.raises(ValueError, match="held_out is 5 for 3 sources of verify_data, expected at least 6"):
        _draw(paths[:1], paths[1:], encode, 64, settings)
    inputs = open_inputs(lettered_llama(1), encode, paths[:1], replace(settings, held_out=6), verify_data=paths[1:])
    held = [one.source for one in inputs.samples[64]["held_out"]]
    assert inputs.sources == 3
    for start in range(len(held) - 5):
        shard = held[start : start + 6]
        assert {shard.count(source) for source in set(held)} == {2}


def test_text_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    book, other = tmp_path / "books" / "book.txt", tmp_path / "other.txt"
    book.parent.mkdir()
    for path in (book, other):
        path.write_text(path.name, encoding="utf-8")
    (tmp_path / "link.txt").symlink_to(book)
    refuse_repeats([book.parent], [other])
    refuse_repeats([book, other], None)
    for data, verify_data in (
        ([book], [book]),
        ([book.parent], [book]),
        ([book], [tmp_path / "link.txt"]),
        ([other, tmp_path / "books" / ".." / "other.txt"], None),
        ([book], [other, other]),
    ):
        with pytest.raises(ValueError, match=r"is named twice, in .*data .* and in .*data .*, expected each text once"):
            refuse_repeats(data, verify_data)
    with pytest.raises(FileNotFoundError, match=r"nowhere does not exist; expected \.txt"):
        refuse_repeats([tmp_path / "nowhere"], None)


def test_a_copy_under_another_name_proves_nothing(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    own, other = (tuple(random.integers(0, 50_000, 512).tolist()) for _ in range(2))

    def held(*tokens: int) -> list[TokenSequence]:
        return [TokenSequence("fresh", other), TokenSequence("copy", tokens)]

    licence = (*own[: 4 * RUN], *other[4 * RUN :])
    refuse_copies([TokenSequence("own", own)], held(*licence))
    for copy in (own, (*other[:100], *own[:412])):
        with pytest.raises(ValueError, match=r"1 of 2 held-out sequences are copies .* the first in copy"):
            refuse_copies([TokenSequence("own", own)], held(*copy))
    book = random_letters(tmp_path / "book.txt")
    copied = tmp_path / "copied.txt"
    copied.write_bytes(book.read_bytes())
    settings = CalibrationSettings(lengths=(64,), sequences=1, joint=1, held_out=8)
    with pytest.raises(ValueError, match="held-out sequences are copies"):
        open_inputs(lettered_llama(1), encode, [book], settings, verify_data=[copied])


def test_text_that_one_length_is_proved_on_was_not_used_for_another(tmp_path: Path) -> None:
    """All lengths read the same stretches: a sequence's place says what it is for, whatever its length."""
    book, lengths = random_letters(tmp_path / "book.txt"), (32, 48, 96)
    settings = CalibrationSettings(lengths=lengths, sequences=2, joint=2, held_out=8)
    samples = open_inputs(lettered_llama(1), encode, [book], settings).samples
    for use in ("risk", "joint", "held_out"):
        longest = [one.tokens for one in samples[lengths[-1]][use]]
        assert len(set(longest)) == len(longest) >= 2
        for length in lengths:
            assert [one.tokens for one in samples[length][use]] == [one[:length] for one in longest]
