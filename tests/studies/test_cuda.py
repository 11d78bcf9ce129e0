"""The study of CUDA devices without one: cells are kept as found, failures are said, the page has the figures."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("triton")

from studies.cuda.__main__ import TITLES, app
from studies.cuda.measure import Cell, Section

PEAKS = {"TFLOP/s": 800.0, "TB/s": 4.0}


def measured(row: Cell) -> None:
    row |= {"FLOP": 4e11, "sdpa": 1000.0, "triton": 800.0}


def refused(row: Cell) -> None:
    row["sdpa"] = 50.0
    raise RuntimeError("no room\nbelow")


def test_cells_are_kept_and_the_page_has_them(tmp_path: Path) -> None:
    words = ["page", "--from", str(tmp_path), "--write", str(tmp_path)]
    assert "got no file of a section" in str(CliRunner().invoke(app, words).exception)
    section = Section(tmp_path / "dense.json", {"commit": "abc", "device": "one"}, PEAKS)
    section.add("4 × 4k", measured)
    section.add("1 × 32k", refused)
    again = Section(tmp_path / "dense.json", {"commit": "abc", "device": "one"}, PEAKS)
    again.add("4 × 4k", refused)
    assert again.cells == section.cells[:1]  # what failed is tried again
    assert Section(tmp_path / "dense.json", {"commit": "abd", "device": "one"}, PEAKS).cells == []
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    page = (tmp_path / "gpu_plans.md").read_text(encoding="utf-8")
    assert f"## {TITLES['dense']}" in page
    assert "| 800 (1.25×) [500, 62%] |" in page
    assert "* RuntimeError: no room (1 × 32k)" in page
    assert json.loads((tmp_path / "gpu_plans.json").read_text())["sections"]["dense"] == section.cells
    other = tmp_path / "later"
    Section(other / "decode.json", {"commit": "abe"}, PEAKS).add("1 × 32k", measured)
    done = CliRunner().invoke(app, ["page", "--from", str(other), "--write", str(tmp_path)])
    assert done.exit_code == 0, done.output
    both = json.loads((tmp_path / "gpu_plans.json").read_text())
    assert both["sections"]["dense"] == section.cells  # what was not measured anew stays, with its setting
    assert (both["setting"], both["settings"]) == ({"commit": "abe"}, {"dense": {"commit": "abc", "device": "one"}})
