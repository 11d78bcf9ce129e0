"""The study of continuous batching at the size of a trial: rows are kept, failures said, and the page has both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from studies import batching
from studies.cuda.measure import Section

pytestmark = pytest.mark.filterwarnings("ignore")


def test_every_arm_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batching.main([16], tmp_path)
    kept = json.loads((tmp_path / "batching.json").read_text(encoding="utf-8"))["cells"]
    arms = {f"{name}, 16, {turn}" for name in ("adaattn", batching.PLANNED, "sdpa") for turn in range(batching.TURNS)}
    assert len(kept) == len(arms)
    assert {row["cell"] for row in kept} == arms
    assert all(row["requests"] == 8 and row["s"] > 0 and row["tokens/s"] > 0 for row in kept)

    def nothing_is_measured_again(*_: Any, **__: Any) -> None:
        pytest.fail("a row that is there was measured again")

    monkeypatch.setattr(batching, "measured", nothing_is_measured_again)
    batching.main([16], tmp_path)
    page = (tmp_path / "batching.md").read_text(encoding="utf-8")
    assert page.count("| 16 | 8 |") == 3


def test_what_an_engine_cannot_do_is_said(tmp_path: Path) -> None:
    section = Section(
        tmp_path / "batching.json", {"device": "one", "torch": "2", "transformers": "5", "commit": "a"}, {}
    )
    section.add("sdpa, 16, 0", lambda row: batching.answered(Stopped(), [[1]], 2) and None)
    assert section.cells[0]["failed"] == "RuntimeError: the engine stopped"
    assert "| sdpa | 16 |  | RuntimeError: the engine stopped |" in batching.page(section)


class Stopped:
    """An engine whose thread has ended."""

    def add_requests(self, *_: Any, **__: Any) -> None:
        """Takes them."""

    def get_result(self, timeout: float) -> None:
        """Nothing comes."""

    def is_running(self) -> bool:
        return False
