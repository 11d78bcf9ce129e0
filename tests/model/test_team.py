"""`accelerate launch` with two processes makes the plan of one, byte for byte."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from adaattn_hf.eval.demo import calibration_pages, demo_model_path
from adaattn_hf.eval.team import Team, join, present
from adaattn_hf.policy.prices import Price

from ..support.calibration import price_table
from ..support.command import adaattn

LENGTH = 160


def test_alone_there_is_a_team_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert join() == (Team(), 0)
    assert present().leads
    assert Team().tell("x") == "x"
    assert list(Team().work([1, 2], str)) == ["1", "2"]


@pytest.mark.slow
def test_two_processes_make_the_plan_of_one(tmp_path: Path) -> None:
    text, prices = tmp_path / "text.txt", tmp_path / "prices.json"
    text.write_text("\n\n".join(calibration_pages()[:14]), encoding="utf-8")
    prices.write_text(price_table(LENGTH, {"exact": Price(1e-4, 1.0), "bf16": Price(1e-4, 0.5)}).to_json())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sizes = f"--lengths {LENGTH} --sequences 3 --rows 16 --labels 1 --joint 3 --held-out 5"
    words = f"--in-place --budget 1% --families bf16 {sizes} --threads 1 --device cpu"
    options = ["--data", str(text), "--prices", str(prices), *words.split()]
    launcher = f"-m accelerate.commands.accelerate_cli launch --cpu --num_processes 2 --main_process_port {port}"
    models = [Path(shutil.copytree(demo_model_path("llama"), tmp_path / n / "model")) for n in ("one", "two")]
    way = [sys.executable, "-P", *launcher.split(), "-m", "adaattn_hf", "calibrate"]
    two = subprocess.Popen(
        [*way, str(models[1]), *options], env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=tmp_path,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    adaattn("calibrate", models[0], *options)
    said, errors = two.communicate(timeout=600)
    assert two.returncode == 0, errors
    assert said.count("held-out text)") == 1  # one of them speaks
    plans = [(model / "adaattn_plan.json").read_bytes() for model in models]
    assert plans[0] == plans[1]
    assert b'"bf16"' in plans[0]
