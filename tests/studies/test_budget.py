"""Texts of other kinds, and pairs that plans of windows read."""

import json
from pathlib import Path

import pytest

from studies.budget import texts
from studies.budget.pairs import fewer_pairs


def test_modules_of_a_library_are_documents(tmp_path: Path) -> None:
    for name in ("a.py", "b.py", "test/c.py", "short.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x" * (1 if name == "short.py" else texts.SHORTEST), encoding="utf-8")
    assert [one["name"] for one in texts.documents(tmp_path)] == ["a.py", "b.py"]
    assert [one["name"] for one in texts.documents(tmp_path, enough=1)] == ["a.py"]
    texts.main([str(tmp_path / "texts.jsonl"), str(tmp_path), "a*"])
    lines = (tmp_path / "texts.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["name"] for line in lines] == ["a.py"]


@pytest.mark.parametrize("length", [5, 64])
def test_fewer_pairs_are_those_that_rows_see(length: int) -> None:
    """Counted row by row; kept blocks depend on the data, and sinks may be more than what a window hides."""
    rules = {"w2+1": (2, 1), "w16+4": (16, 4), "w3+60 int8": (3, 60), "exact": (length, 0), "int8": (length, 0)}
    for picks in ([*rules], ["exact"], ["w2+1", "w2+1", "w3+60 int8"]):
        read = sum(
            min(i + 1, window) + min(sinks, max(i + 1 - window, 0)) for window, sinks in map(rules.__getitem__, picks)
            for i in range(length)
        )  # fmt: skip
        expected = len(picks) * length * (length + 1) / 2 / read
        assert fewer_pairs(picks, length) == pytest.approx(expected)
    assert fewer_pairs(["exact", "p0.9"], length) is None
