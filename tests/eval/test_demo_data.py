"""The demo models and the text that travel with the package."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from adaattn_hf.eval import demo

NAMES = tuple(demo.DEMO_MODELS)
DATA = Path(demo.__file__).parent


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the demo reached for the network"))


def test_everything_together_is_at_most_8_mb() -> None:
    files = [path for folder in DATA.iterdir() if folder.is_dir() for path in folder.rglob("*") if path.is_file()]
    kept = [path for path in files if "__pycache__" not in path.parts]
    assert {path.parent.name for path in kept} == {*(f"model-{name}" for name in demo.DEMO_MODELS), "text-sample"}
    assert sum(path.stat().st_size for path in kept) <= 8_000_000


@pytest.mark.parametrize("name", NAMES)
def test_model_loads_in_fp32_and_is_what_its_record_says(name: str) -> None:
    place, loader = demo.demo_model_path(name), AutoModelForMaskedLM if name == "bert" else AutoModelForCausalLM
    model, facts = loader.from_pretrained(place), json.loads((place / "training.json").read_text())
    assert model.dtype == torch.float32
    assert model.config.model_type == name
    assert model.config.max_position_embeddings >= 512
    assert model.num_parameters() == facts["parameters"]
    assert model.config.num_attention_heads >= 4
    assert name != "llama" or 1 < model.config.num_key_value_heads < model.config.num_attention_heads
    assert f"{facts['figures']['nll']['heldout']:.3f}" in (place / "README.md").read_text()


def test_held_out_documents_were_not_trained_on() -> None:
    splits = json.loads((DATA / "text-sample" / "splits.json").read_text(encoding="utf-8"))
    bodies = {split: set(documents.values()) for split, documents in splits.items()}
    assert not bodies["heldout"] & (bodies["train"] | bodies["validation"])
    assert not bodies["validation"] & bodies["train"]
    for file, split in (("heldout.jsonl", "heldout"), ("calibration.jsonl", "validation")):
        for line in (DATA / "text-sample" / file).read_text().splitlines():
            page = json.loads(line)
            assert splits[split][page["document"]] == page["sha256"]
    for item in demo.lastword_items():
        assert item["document"] in splits["heldout"]


def test_unknown_demo_model_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"bert, gpt2, llama. Did you mean 'llama'"):
        demo.demo_model_path("lama")
