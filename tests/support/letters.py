"""A small LLaMA-class model whose tokens are letters, texts for it, and a calibration of it by a table of prices."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from adaattn_hf.calibration.settings import CalibrationSettings
from adaattn_hf.policy.prices import PriceTable

from .calibration import price_table

LENGTH = 192
CHOICES = (
    "exact", "int8", "bf16", "w32+16", "w32+16 bf16", "w32+16 int8", "w64+16", "w64+16 bf16", "w64+16 int8", "r16",
)  # fmt: skip
SETTINGS = CalibrationSettings(
    budget=2e-2, lengths=(LENGTH,), sequences=2, rows=48, labels=2, held_out=8, needles=2, haystacks=1, rounds=0,
    windows=(32, 64), families=("window", "bf16", "int8", "rank"),
)  # fmt: skip


def lettered_llama(layers: int = 2, seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """Random weights, the same at every call, with attention by adaattn; two query heads share a key/value head."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = dict(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, initializer_range=0.08,
    )  # fmt: skip
    config = LlamaConfig(**sizes | changes)
    config._attn_implementation = "adaattn"
    model: LlamaForCausalLM = LlamaForCausalLM(config).eval()
    return model


def encode(text: str) -> list[int]:
    return [ord(character) % 128 for character in text]


def random_words(path: Path) -> Path:
    """Writes 120 lines of 12 words out of 200, the same at every call."""
    random = np.random.default_rng(0)
    words = ["".join(chr(97 + c) for c in random.integers(0, 26, random.integers(2, 8))) for _ in range(200)]
    path.write_text("\n".join(" ".join(random.choice(words, 12)) for _ in range(120)), encoding="utf-8")
    return path


def random_letters(path: Path) -> Path:
    """Writes 100 lines of 60 letters, the same at every call."""
    letters = np.random.default_rng(0).integers(97, 123, 6000)
    lines = ("".join(map(chr, letters[i : i + 60])) for i in range(0, 6000, 60))
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def letter_prices(**seconds: float) -> PriceTable:
    def cost(label: str) -> float:
        part = {"w32+16": 0.1, "w64+16": 0.2, "r16": 0.9}.get(label.split()[0], 1.0)
        return seconds.get(label, part * (0.5 if "bf16" in label else 1.0))

    return price_table(LENGTH, {label: cost(label) for label in CHOICES})
