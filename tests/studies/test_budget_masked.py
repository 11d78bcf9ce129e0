"""The budget study of a masked-language model, step by step on the packaged BERT, and its page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from studies.budget.masked import app
from studies.budget.masked_report import markdown

from ..support.processor import ROUNDS_BF16
from ..support.source_tree import ROOT

PAGE = ROOT / "docs" / "results" / "budget_masked.json"


SMALL = ["--sequences", "1", "--rows", "16", "--labels", "1", "--joint", "1", "--held-out", "3", "--maskings"]
"""Settings of a seed; the number of maskings follows."""


def step(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("study")
    common = ["--output", str(directory), "--lengths", "128", "--families", "bf16,window"]
    assert step("prices", *common).exit_code == 0
    # whether bf16 saves time on 128 tokens is this machine's affair; here it does
    path = directory / "prices.json"
    table = json.loads(path.read_text(encoding="utf-8"))
    cost = {"exact": 1e-4, "bf16": 5e-5, "w32+16": 4e-5, "w32+16 bf16": 2e-5}
    table["prices"] = {"prefill": {"128": {label: [0.0, seconds] for label, seconds in cost.items()}}}
    path.write_text(json.dumps(table), encoding="utf-8")
    done = step("seeds", *common, "--seeds", "0-1", "--budgets", "10%", *SMALL, "2")
    assert done.exit_code == 0, done.output
    assert step("speed", "--output", str(directory), "--lengths", "128", "--rounds", "1").exit_code == 0
    return directory


def test_the_steps_leave_records_that_make_a_page(output: Path) -> None:
    target = output / "page.json"
    assert step("report", "--output", str(output), str(target)).exit_code == 0
    record: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
    assert len(record["seeds"]) == 2
    for seed in record["seeds"]:
        assert seed["settings"]["scoring"]["maskings"] == 2
        assert len(seed["picks"]) == 4 * 5
        # windows of 32 tokens both ways leave out more than a quarter of 128
        assert set(seed["picks"]) <= {"exact", "bf16", "w32+16", "w32+16 bf16"}
    assert {one["plan"] for one in record["curve"]["uniform"]} == {"bf16", "w32+16", "w32+16 bf16"}
    assert all(
        (one["kl"] > 0) == (ROUNDS_BF16 or one["plan"] != "bf16") for one in record["curve"]["uniform"]
    )
    assert set(record["speed"]["attention"]) == {"stock sdpa", "exact", "10%"}
    assert min(record["speed"]["model"].values()) > 0
    page = target.with_suffix(".md").read_text(encoding="utf-8")
    for words in ("2 of 2 seeds", "nothing is generated", "2 readings of each sequence", "| w32+16 bf16 |"):
        assert words in page, page

    # what is there is not measured again, and of other settings refused
    before = {path: path.stat().st_mtime_ns for path in output.glob("*-*.json")}
    common = ["--output", str(output), "--lengths", "128", "--families", "bf16,window", "--seeds", "0-1"]
    assert step("seeds", *common, "--budgets", "10%", *SMALL, "2").exit_code == 0
    assert before == {path: path.stat().st_mtime_ns for path in output.glob("*-*.json")}
    other = step("seeds", *common, "--budgets", "10%", *SMALL, "3")
    assert other.exit_code != 0
    assert "other settings" in str(other.exception)


def test_the_page_is_that_of_the_kept_figures() -> None:
    text = markdown(json.loads(PAGE.read_text(encoding="utf-8")))
    assert text == PAGE.with_suffix(".md").read_text(encoding="utf-8")
