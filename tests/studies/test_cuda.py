"""The study of CUDA devices without one: cells are kept as found, failures are said, the page has the figures."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("triton")

from studies.cuda.__main__ import TITLES, app
from studies.cuda.compiled import compiled
from studies.cuda.light import BATCHES, TOKENS, light
from studies.cuda.measure import Cell, Section
from studies.cuda.stored import apart, steady

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


def test_two_lengths_tell_the_rate_of_reading_from_the_fixed_time() -> None:
    """Codes at 4 TB/s after 20 µs, numbers at 4.5 TB/s after 10 µs: the rows hold the sums."""

    def row(thousand: int) -> Cell:
        tokens = 8 * 8 * thousand * 1024
        times = {"codes, captured": 20.0 + tokens * 258 / 4e6, "bf16, sdpa, captured": 10.0 + tokens * 512 / 4.5e6}
        return {"cell": f"8 × {thousand}k, int8", "bytes": float(tokens * 258), **times}

    (line,) = steady([row(32), row(1), row(16)])
    assert line == (
        "* int8, from 8 × 16k to 8 × 32k: `bf16, sdpa` reads at 4.50 TB/s, plus 10 µs fixed; "
        "`codes` reads at 4.00 TB/s, plus 20 µs fixed"
    )
    level = [row(16), row(32) | {"codes, captured": 0.0}]
    assert steady(level)[0].endswith("10 µs fixed"), "a longer call that takes less time tells no rate"
    assert "at most 1.0%" in apart([{"largest": 0.2, "difference": 1e-3}, {"largest": 0.1, "difference": 1e-3}])


def test_short_calls_are_tried_without_a_device(tmp_path: Path) -> None:
    section = Section(tmp_path / "light.json", {"commit": "abc", "device": "one"}, PEAKS)
    light(section)
    assert not [row for row in section.cells if "failed" in row]
    assert len(section.cells) == 3 * (len(TOKENS) + len(BATCHES))
    assert all(row[arm] > 0 for row in section.cells for arm in ("sdpa", "auto", "by our sdpa"))


def test_compiled_models_are_tried_without_a_device(tmp_path: Path) -> None:
    section = Section(tmp_path / "compiled.json", {"commit": "abc", "device": "one"}, PEAKS)
    compiled(section)
    assert not [row for row in section.cells if "failed" in row or "refused" in row]
    assert all(row["stock"] > 0 and row["adaattn"] > 0 for row in section.cells)
