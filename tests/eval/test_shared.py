"""`accelerate launch` with two processes measures the report of one."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_two_processes_measure_what_one_does(llama: Path, texts: Path, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = f"-m accelerate.commands.accelerate_cli launch --cpu --num_processes 2 --main_process_port {port}"
    outputs = []
    for name, way in (("one", "-P -m adaattn_hf"), ("two", f"-P {launch} -m adaattn_hf")):
        words = [sys.executable, *way.split(), "eval", str(llama), "--data", f"wikitext:{texts / 'pages.txt'}"]
        words += ["--context", "16", "--device", "cpu", "--threads", "1", "--output-dir", str(tmp_path / name)]
        done = subprocess.run(
            words, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=tmp_path, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    reports = [json.loads((tmp_path / name / "wikitext" / "report.json").read_text()) for name in ("one", "two")]
    assert reports[0]["quality"] == reports[1]["quality"]
    assert outputs[1].count("reports: ") == 1  # one of them speaks
    journals = [(tmp_path / name / "wikitext" / "journal.jsonl").read_text().splitlines() for name in ("one", "two")]
    assert len(journals[0]) == len(journals[1]) > 10
