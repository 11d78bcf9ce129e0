"""The study of a cache format for each layer at a tiny size: every layer alone, then so many of them, on the page."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from adaattn_hf.eval.demo import demo_model_path, pages_path
from studies.cache_layers import app, logits


def test_layers_are_ranked_alone_and_measured_together(tmp_path: Path) -> None:
    model, text = str(demo_model_path("llama")), str(pages_path("heldout"))
    sizes = ["--windows", "2", "--window", "64"]
    done = CliRunner().invoke(app, ["--model", model, "--text", text, "--write", str(tmp_path), *sizes])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "cache_layers.json").read_text())
    assert set(found["alone"]) == {"none", *map(str, range(found["layers"]))}
    none, every = found["mixed"][0], found["mixed"][-1]
    assert (none["layers"], every["layers"]) == (0, found["layers"])
    assert none["bytes"] > every["bytes"] > 0.25
    assert 0 < none["kl"] < every["kl"]
    words = (tmp_path / "cache_layers.md").read_text()
    assert all(f"| {row['layers']} of {found['layers']} |" in words for row in found["mixed"])


def test_only_the_layers_that_are_named_keep_fewer_bits() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 128, "intermediate_size": 32, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).eval()
    model.set_attn_implementation("adaattn")
    tokens = torch.randint(61, (80,), generator=torch.Generator().manual_seed(0))
    exact = logits(model, tokens, None)
    with torch.no_grad():
        torch.testing.assert_close(exact, model(tokens[None]).logits[0, :-1])
    errors = [float((logits(model, tokens, fewer) - exact).norm()) for fewer in ((), (1,), (0, 1))]
    assert 0 < errors[0] < errors[1] < errors[2]
