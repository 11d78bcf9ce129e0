"""The examples run as they are, offline, on the models of the package."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from adaattn_hf import Plan
from adaattn_hf.eval.demo import demo_model_path

from ..support.choices import make_choice
from ..support.plans import plan_for

ROOT = Path(__file__).resolve().parents[2]


def run(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> None:
    script = ROOT / "examples" / name
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    runpy.run_path(str(script), run_name="__main__")


def test_generate_says_the_same_as_stock(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, "generate.py", "--tokens", "12")
    assert "same tokens as stock sdpa: True" in capsys.readouterr().out


def test_perplexity_prints_both_arms(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, "perplexity.py", "--tokens", "1200")
    lines = capsys.readouterr().out.splitlines()
    stock, tested = (
        float(line.split()[-1])
        for line in lines
        if line.strip().startswith(("sdpa: perplexity", "adaattn: perplexity"))
    )
    assert 5 < stock < 100
    assert tested == pytest.approx(stock, rel=1e-4)


def test_perplexity_reads_a_users_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "mine.txt"
    text.write_text("The Congress met. The President spoke to the Congress. " * 8)
    run(monkeypatch, "perplexity.py", str(ROOT / "eval" / "demo" / "model-llama"), str(text), "--tokens", "64")
    assert "adaattn: perplexity" in capsys.readouterr().out


def test_trainer_lowers_the_loss_and_writes_a_stock_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(
        monkeypatch, "finetune_trainer.py", "--steps", "4", "--context", "64", "--pages", "1",
        "--output-dir", str(tmp_path),
    )  # fmt: skip
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("held-out loss")]
    before, after = float(line.split()[2]), float(line.split()[4])
    assert after < before - 1e-3
    assert AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa").config.model_type == "llama"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks for it by its old name
def test_lora_learns_under_a_plan_and_is_loaded_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(demo_model_path("llama"), attn_implementation="adaattn")
    plan = plan_for(model, make_choice("window", window=16), lengths=(64,))
    plan.save_pretrained(tmp_path / "plan")
    run(
        monkeypatch, "finetune_lora_plan.py", "--plan", str(tmp_path / "plan"), "--steps", "3", "--context", "64",
        "--output", str(tmp_path / "lora"), "--json", str(tmp_path / "losses.json"),
        "--picture", str(tmp_path / "losses.svg"),
    )  # fmt: skip
    assert "loaded again, the same: True" in capsys.readouterr().out
    losses = json.loads((tmp_path / "losses.json").read_text())
    for name in ("exact", "plan"):
        assert len(losses[name]["steps"]) == 3
        assert losses[name]["after"] < losses[name]["before"] - 0.05
    assert losses["exact"]["before"] != losses["plan"]["before"]
    assert (tmp_path / "losses.svg").read_text().startswith("<?xml")
    assert Plan.from_pretrained(tmp_path / "lora") == plan
