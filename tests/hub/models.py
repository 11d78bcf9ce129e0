"""Small models that run under a kernel's name, beside the same model under stock attention."""

import copy
from typing import Any

import torch
import transformers as tf
from torch import Tensor

FLASH = "adaattn/flash-adaattn"
SIZES: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=100, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
FAMILIES: dict[str, Any] = {
    "llama": lambda: tf.LlamaConfig(**SIZES), "mistral": lambda: tf.MistralConfig(**SIZES, sliding_window=4),
    "gemma2": lambda: tf.Gemma2Config(**SIZES, head_dim=16, sliding_window=4, attn_logit_softcapping=5.0),
}  # fmt: skip
"""Grouped heads; with windows; with windows in every other layer and a softcap."""


def beside_stock(family: str, name: str = FLASH, stock: str = "eager") -> tuple[Any, Any]:
    config = FAMILIES[family]()
    torch.manual_seed(0)
    known = tf.AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=stock).eval()
    ours = tf.AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=name).eval()
    ours.load_state_dict(known.state_dict())
    assert known.config._attn_implementation == stock
    assert ours.config._attn_implementation == name
    return known, ours


def padded_batch(side: str = "left") -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, 100, (3, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(3, 12, dtype=torch.long)
    for row, length in enumerate((12, 7, 3)):
        hidden = slice(0, 12 - length) if side == "left" else slice(length, 12)
        mask[row, hidden] = 0
    return ids, mask
