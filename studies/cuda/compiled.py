"""Whole models under `torch.compile`, stock beside AdaAttn: what a user who compiles by hand gets."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

import adaattn_hf  # noqa: F401  # registers the name

from .measure import DEVICE, ON_CUDA, Cell, Section, length, race

LAYERS = 4
SIZES: dict[str, Any] = {
    "vocab_size": 1024, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": LAYERS,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 1 << 17,
}  # fmt: skip
TRIAL: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "head_dim": 32}
BERT: dict[str, Any] = {"vocab_size": 1024, "num_hidden_layers": LAYERS}


def compiled(section: Section) -> None:
    """Prompts, plain, padded and windowed; an encoder's padded batch; capped scores; both passes."""
    llama = partial(_model, LlamaForCausalLM, LlamaConfig, SIZES)
    mistral = partial(_model, MistralForCausalLM, MistralConfig, SIZES | {"sliding_window": length(1024)})
    gemma = partial(_model, Gemma2ForCausalLM, Gemma2Config, SIZES | {"sliding_window": length(1024)})
    bert = partial(_model, BertModel, BertConfig, BERT)
    cells: dict[str, tuple[Callable[[str], Any], str, Tensor, bool]] = {
        "causal, 1 × 4k": (llama, "sdpa", _rows(4096), False),
        "left-padded, 4 × 2k": (llama, "sdpa", _rows(2048, 4), False),
        "window of 1k, 1 × 8k": (mistral, "sdpa", _rows(8192), False),
        "encoder, 16 rows of 512 to 32 tokens": (bert, "sdpa", _rows(512, 16).flip(1), False),
        "softcap, and windows of 1k in half of the layers, 1 × 4k": (gemma, "eager", _rows(4096), False),
        "causal, 2 × 2k, both passes": (llama, "sdpa", _rows(2048).expand(2, -1), True),
    }
    for name, (model, stock, mask, train) in cells.items():
        section.add(f"{name}, {LAYERS} layers", partial(_cell, model=model, stock=stock, mask=mask, train=train))


def _rows(tokens: int, rows: int = 1) -> Tensor:
    """The mask of rows whose real tokens grow by equal steps up to all, padded on the left."""
    n = length(tokens)
    mask = torch.ones(rows, n, dtype=torch.long, device=DEVICE)
    for row in range(1, rows):
        mask[row, : row * n // rows] = 0
    return mask


def _model(kind: Any, config: Any, sizes: dict[str, Any], implementation: str) -> Any:
    given = sizes if ON_CUDA or kind is BertModel else sizes | TRIAL | {"num_key_value_heads": 1}
    torch.manual_seed(0)
    with DEVICE:
        made = kind._from_config(config(**given), attn_implementation=implementation, dtype=torch.bfloat16)
    made.config.use_cache = False
    return made.to(DEVICE).eval()


def _cell(row: Cell, model: Callable[[str], Any], stock: str, mask: Tensor, train: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    ids = torch.randint(0, 1024, mask.shape, device=DEVICE)
    given = {} if bool(mask.all()) else {"attention_mask": mask}
    arms: dict[str, Any] = {}
    row["first pass, s"] = {}
    for name, implementation in (("stock", stock), ("adaattn", "adaattn")):
        found = model(implementation)
        call = torch.compile(found) if ON_CUDA else found
        arms[name] = partial(_both_passes if train else _forward, call, ids, given)
        started = time.perf_counter()
        arms[name]()
        row["first pass, s"][implementation] = time.perf_counter() - started
    race(row, arms, rep=300)


@torch.no_grad()
def _forward(model: Any, ids: Tensor, given: dict[str, Tensor]) -> None:
    model(ids, **given)


def _both_passes(model: Any, ids: Tensor, given: dict[str, Tensor]) -> None:
    model.zero_grad()
    model(ids, labels=ids, **given).loss.backward()
