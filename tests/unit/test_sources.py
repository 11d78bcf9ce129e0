"""Held-out text of several named sources: each must keep the budget, and each must have enough sequences to say so."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from adaattn_hf.calibration.corpus import TokenSequence
from adaattn_hf.calibration.inputs import _draw, _each
from adaattn_hf.calibration.settings import CalibrationSettings
from adaattn_hf.calibration.verify import Evidence

BUDGET, LEVEL, EACH = 1e-3, 0.05, 12


def evidence(means: tuple[float, float], random: np.random.Generator, *, apart: bool) -> Evidence:
    found = Evidence(apart=apart)
    for source, mean in zip("ab", means, strict=True):
        for place in range(EACH):
            found.names.append(f"{source}{place}")
            found.sources.append(source)
            found.tokens.append(1000)
            found.sums.append(1000 * (mean + 3e-4 * random.standard_t(5)))
    return found


def passes(means: tuple[float, float], *, apart: bool, draws: int = 2000) -> float:
    random = np.random.default_rng(0)
    uppers = [evidence(means, random, apart=apart).bound(1.0 - LEVEL).upper for _ in range(draws)]
    return float(np.mean(np.array(uppers) <= BUDGET))


def test_a_plan_that_breaks_the_budget_on_one_source_hardly_ever_passes() -> None:
    beyond = (0.0, 1.001 * BUDGET)
    assert passes(beyond, apart=True) <= LEVEL
    assert passes(beyond, apart=False) > 0.9, "the mean of the sources keeps the budget"
    assert passes((0.0, 0.5 * BUDGET), apart=True) > 0.9


def test_the_bound_is_that_of_the_worst_source_and_counts_all_tokens() -> None:
    both = evidence((0.0, 1e-3), np.random.default_rng(1), apart=True)
    alone = Evidence(**{name: getattr(both, name)[EACH:] for name in ("names", "sums", "tokens", "sources")})
    assert both.bound(0.95).upper == alone.bound(0.95).upper
    assert both.bound(0.95).tokens == 2 * EACH * 1000 == 2 * alone.bound(0.95).tokens


def test_held_out_sequences_take_turns_as_long_as_every_source_has_one(tmp_path: Path) -> None:
    for name, pages in (("long", 30), ("short", 3)):
        record = json.dumps({"text": "x" * 64}) + "\n"
        (tmp_path / f"{name}.jsonl").write_text(record * pages, encoding="utf-8")
    paths = [tmp_path / "long.jsonl", tmp_path / "short.jsonl"]
    settings = CalibrationSettings(lengths=(64,), sequences=1, joint=1, held_out=4, most_held_out=8)
    sample = _draw(paths[:1], paths, lambda text: [1] * len(text), 64, settings)
    assert [one.source for one in sample.held_out] == ["long.jsonl", "short.jsonl"] * 3
    few = [TokenSequence("d", (1,), "long.jsonl")] * 4 + [TokenSequence("d", (1,), "short.jsonl")]
    with pytest.raises(ValueError, match=r"short\.jsonl holds 1 sequences of 64 tokens, expected at least 2"):
        _each(few, paths, 64)
