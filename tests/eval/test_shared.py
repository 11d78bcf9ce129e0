"""`accelerate launch` with two processes measures the report of one."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ..support.command import adaattn


@pytest.mark.slow
def test_two_processes_measure_what_one_does(llama: Path, texts: Path, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = f"-m accelerate.commands.accelerate_cli launch --cpu --num_processes 2 --main_process_port {port}"
    words = [str(llama), "--data", f"wikitext:{texts / 'pages.txt'}", "--context", "16", "--device", "cpu"]
    words += ["--threads", "1", "--output-dir"]
    done = subprocess.run(
        [sys.executable, "-P", *launch.split(), "-m", "adaattn_hf", "eval", *words, str(tmp_path / "two")],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=tmp_path, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    adaattn("eval", *words, tmp_path / "one")
    reports = [json.loads((tmp_path / name / "wikitext" / "report.json").read_text()) for name in ("one", "two")]
    assert reports[0]["quality"] == reports[1]["quality"]
    assert done.stdout.count("reports: ") == 1  # one of them speaks
    journals = [(tmp_path / name / "wikitext" / "journal.jsonl").read_text().splitlines() for name in ("one", "two")]
    assert len(journals[0]) == len(journals[1]) > 10
