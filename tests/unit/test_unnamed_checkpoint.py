"""Checkpoints whose configuration names no class (GGUF files, directories without `architectures`), and broken ones."""

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, ViTConfig, ViTModel

from adaattn_hf.errors import ModelUnavailable
from adaattn_hf.eval.demo import demo_model_path
from adaattn_hf.patches.checkpoint import load

SIZES: dict[str, Any] = dict(
    vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
)
ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")


def unnamed(directory: Path, model: Any) -> Path:
    model.save_pretrained(directory)
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    del config["architectures"]
    path.write_text(json.dumps(config), encoding="utf-8")
    return directory


def test_a_gguf_file_is_a_causal_model(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="needs the package gguf")
    torch.manual_seed(0)
    blocks = {f"blk.0.{name}.weight": torch.randn(64, 64) for name in (*ATTENTION, "ffn_gate", "ffn_up", "ffn_down")}
    norms = {name: torch.ones(64) for name in ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight")}
    tables = {"token_embd.weight": torch.randn(96, 64), "output.weight": torch.randn(96, 64)}
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    sizes = {"vocab_size": 96, "context_length": 64, "embedding_length": 64, "feed_forward_length": 64}
    for name, size in (
        sizes | {"block_count": 1, "head_count": 2, "head_count_kv": 2, "layer_norm_rms_eps": 1e-6}
    ).items():
        getattr(writer, f"add_{name}")(size)
    for name, tensor in {**blocks, **norms, **tables}.items():
        writer.add_tensor(name, tensor.numpy())
    for part in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{part}_to_file")()
    writer.close()
    found = load(tmp_path, gguf_file="tiny.gguf", tokenizer=str(demo_model_path("llama")))
    assert found.objective == "causal"
    assert isinstance(found.model, LlamaForCausalLM)
    assert torch.equal(found.model.lm_head.weight, tables["output.weight"])


def test_a_family_with_a_head_is_causal_and_one_without_is_refused(tmp_path: Path) -> None:
    tokens = str(demo_model_path("llama"))
    llama = unnamed(tmp_path / "llama", LlamaForCausalLM(LlamaConfig(**SIZES)))
    assert load(llama, tokenizer=tokens).objective == "causal"
    sizes = {**SIZES, "vocab_size": None, "image_size": 8, "patch_size": 4}
    image = unnamed(tmp_path / "vit", ViTModel(ViTConfig(**sizes)))
    with pytest.raises(ModelUnavailable, match="saved as nothing that its config names"):
        load(image, tokenizer=tokens)


def test_weights_of_a_head_that_are_not_there_are_missed(tmp_path: Path) -> None:
    bare = unnamed(tmp_path / "bert", BertModel(BertConfig(**SIZES)))
    with pytest.raises(ModelUnavailable, match="weights of its language-model head"):
        load(bare, tokenizer=str(demo_model_path("bert")))


def test_a_directory_of_a_plan_alone_is_no_model(tmp_path: Path) -> None:
    for name in ("config.json", "adaattn_plan.json"):
        (tmp_path / name).write_text("{}", encoding="utf-8")
    (tmp_path / "adaattn_plan.safetensors").write_bytes(b"")
    with pytest.raises(ModelUnavailable, match=f"holds a plan and no weights.* --plan {tmp_path}"):
        load(tmp_path)


WHOLE = (demo_model_path("llama") / "model.safetensors").read_bytes()


@pytest.mark.parametrize(("name", "content"), [
    *(("config.json", {name: value}) for name, value in {
        "num_attention_heads": 0, "hidden_size": "x", "vocab_size": 10, "dtype": "no_such_dtype", "architectures": [3],
        "pad_token_id": 10**9, "quantization_config": 3, "layer_types": ["x"], "rope_parameters": 3,
    }.items()),
    ("config.json", b"null"), ("config.json", b"[" * 100_000), ("generation_config.json", b"[]"),
    ("tokenizer.json", b"[]"), ("tokenizer_config.json", b"[]"), ("model.safetensors.index.json", b"[]"),
    ("model.safetensors", b""), ("model.safetensors", WHOLE[:20]), ("model.safetensors", WHOLE[:-1]),
    ("pytorch_model.bin", b""), ("pytorch_model.bin", b"no pickle"), ("pytorch_model.bin", b"PK\x03\x04"),
], ids=lambda value: value if isinstance(value, str) else repr(value)[:30])  # fmt: skip
def test_a_damaged_checkpoint_is_a_sentence(name: str, content: Any, tmp_path: Path) -> None:
    path = shutil.copytree(demo_model_path("llama"), tmp_path / "model") / name
    if isinstance(content, dict):
        content = json.dumps(json.loads(path.read_bytes()) | content).encode()
    if "model" in name:
        (path.parent / "model.safetensors").unlink()
    path.write_bytes(content)
    with pytest.raises(ModelUnavailable, match=r"^(model|tokenizer): "):
        load(path.parent)


def test_memory_that_is_full_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    full = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", full)
    with pytest.raises(torch.OutOfMemoryError):
        load(demo_model_path("llama"))
