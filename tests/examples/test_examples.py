"""The examples run as they are, offline, on the models of the package."""

import json
import re
import runpy
import sys
import threading
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import adaattn_hf
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
    lines = (line.strip() for line in capsys.readouterr().out.splitlines())
    shown = [line for line in lines if line.startswith(("sdpa: perplexity", "adaattn: perplexity"))]
    stock, tested = (float(line.split()[-1]) for line in shown)
    assert 5 < stock < 100
    assert tested == pytest.approx(stock, rel=1e-4)


def test_a_users_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_the_embedding_server_computes_no_half_precision_that_is_slow_on_a_cpu(tmp_path: Path) -> None:
    script = runpy.run_path(str(ROOT / "examples" / "embedding_server.py"), run_name="embedding_server")
    AutoModel.from_pretrained(demo_model_path("bert"), dtype=torch.float16).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(demo_model_path("bert")).save_pretrained(tmp_path)
    embed = script["Embedder"](str(tmp_path))
    assert embed.model.dtype in (torch.bfloat16, torch.float32)
    assert embed(["The Congress met."]).norm().item() == pytest.approx(1.0, abs=1e-2)


def test_the_embedding_server_answers_as_the_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    script = runpy.run_path(str(ROOT / "examples" / "embedding_server.py"), run_name="embedding_server")
    texts = ["The Congress met.", "The whale rose slowly behind the ship, and the men at the oars saw it. " * 4]
    with script["make_server"](str(demo_model_path("bert")), 0) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        address = f"http://127.0.0.1:{server.server_port}"
        with urlopen(Request(address, json.dumps({"texts": texts}).encode())) as answer:
            found = torch.tensor(json.load(answer)["embeddings"])
        for wrong in (b"{}", b"[", json.dumps({"texts": [1]}).encode()):
            with pytest.raises(HTTPError, match="400") as refused:
                urlopen(Request(address, wrong))
            refused.value.close()
        server.shutdown()
        serving.join()
    embed = server.RequestHandlerClass.embed
    assert adaattn_hf.unpad_calls(embed.model) == {"unpadded": 1}
    stock = AutoModel.from_pretrained(demo_model_path("bert"), attn_implementation="sdpa").eval()
    for text, vector in zip(texts, found, strict=True):
        with torch.no_grad():
            hidden = stock(**embed.tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
        torch.testing.assert_close(vector, torch.nn.functional.normalize(hidden, dim=0), atol=1e-5, rtol=1e-4)


def test_a_long_document_is_summarised_under_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(demo_model_path("llama"), attn_implementation="adaattn")
    plan_for(model, make_choice("window", window=64), lengths=(512,), budget=1e-2).save_pretrained(tmp_path)
    run(monkeypatch, "summarise_long.py", "--plan", str(tmp_path), "--tokens", "300", "--new", "4")
    last = capsys.readouterr().out.splitlines()[-1]
    change = float(re.fullmatch(r"300 tokens read; perplexity on this prompt (\S+) %, allowed .* \+1 %", last)[1])
    assert change != 0.0


def test_another_model_asks_for_its_plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, "summarise_long.py", "owner/model")
    assert "--plan is absent, expected the plan of MODEL" in capsys.readouterr().err
