"""`accelerate launch` with two processes makes the plan of one, byte for byte, and measures the report of one."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from adaattn_hf.eval.demo import calibration_pages, demo_model_path
from adaattn_hf.eval.team import Team, join, present
from adaattn_hf.policy.prices import Price

from ..support.calibration import price_table
from ..support.command import adaattn
from ..support.launching import launched

LENGTH = 160


def test_alone_there_is_a_team_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert (join(), present().is_main) == (Team(), True)
    assert Team().broadcast("x") == "x"
    assert list(Team().work([1, 2], str)) == ["1", "2"]


@pytest.mark.parametrize("gpus", [True, False])
def test_each_of_several_processes_takes_a_gpu_unless_a_device_is_named(
    gpus: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert [Team(5, 8).device(named) for named in (None, "cuda", "cpu", "cuda:0")] == [
        "cuda:1" if gpus else None, "cuda:1" if gpus else "cuda", "cpu", "cuda:0",
    ]  # fmt: skip
    assert Team().device(None) is None


@pytest.mark.slow
def test_two_processes_make_the_plan_and_the_report_of_one(tmp_path: Path) -> None:
    text, prices = tmp_path / "text.txt", tmp_path / "prices.json"
    text.write_text("\n\n".join(calibration_pages()[:14]), encoding="utf-8")
    prices.write_text(price_table(LENGTH, {"exact": Price(1e-4, 1.0), "bf16": Price(1e-4, 0.5)}).to_json())
    sizes = f"--lengths {LENGTH} --sequences 3 --rows 16 --labels 1 --joint 3 --held-out 5"
    given = f"--data {text} --threads 1 --device cpu"
    makes = f"{given} --prices {prices} --in-place --budget 1% --families bf16 {sizes}".split()
    measures = f"{demo_model_path('llama')} {given} --context 64 --limit-tokens 900 --batch-size 1 --output-dir".split()
    places = [tmp_path / name for name in ("one", "two")]
    models = [Path(shutil.copytree(demo_model_path("llama"), place / "model")) for place in places]
    two = launched([["calibrate", str(models[1]), *makes], ["eval", *measures, str(places[1])]], tmp_path)
    adaattn("calibrate", models[0], *makes)
    adaattn("eval", *measures, places[0])
    said, errors = two.communicate(timeout=600)
    assert two.returncode == 0, errors
    assert said.count("held-out text)") == said.count("reports: ") == 1, "one of them speaks"
    plans = [(model / "adaattn_plan.json").read_bytes() for model in models]
    assert plans[0] == plans[1]
    assert b'"bf16"' in plans[0]
    reports = [json.loads((place / "text" / "report.json").read_text()) for place in places]
    assert reports[0]["quality"] == reports[1]["quality"]
    journals = [(place / "text" / "journal.jsonl").read_text().splitlines() for place in places]
    assert len(journals[0]) == len(journals[1]) > 10
