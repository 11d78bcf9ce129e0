"""`accelerate launch` with two processes measures the report of one."""

import json
from pathlib import Path

import pytest

from ..support.command import adaattn
from ..support.launching import launched


@pytest.mark.slow
def test_two_processes_measure_what_one_does(llama: Path, texts: Path, tmp_path: Path) -> None:
    words = [str(llama), "--data", f"wikitext:{texts / 'pages.txt'}", "--context", "16", "--device", "cpu"]
    words += ["--threads", "1", "--output-dir"]
    two = launched(["eval", *words, str(tmp_path / "two")], tmp_path)
    adaattn("eval", *words, tmp_path / "one")
    said, errors = two.communicate(timeout=600)
    assert two.returncode == 0, errors
    reports = [json.loads((tmp_path / name / "wikitext" / "report.json").read_text()) for name in ("one", "two")]
    assert reports[0]["quality"] == reports[1]["quality"]
    assert said.count("reports: ") == 1  # one of them speaks
    journals = [(tmp_path / name / "wikitext" / "journal.jsonl").read_text().splitlines() for name in ("one", "two")]
    assert len(journals[0]) == len(journals[1]) > 10
