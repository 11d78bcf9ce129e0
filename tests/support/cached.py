"""Small models whose heads have as many channels as four bits need, tokens for them, and calls over a cache."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

VOCAB = 61
SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
GPT2: dict[str, Any] = dict(vocab_size=VOCAB, n_embd=128, n_layer=2, n_head=4, n_positions=256)


def _made(family: str, implementation: str = "adaattn", seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    if family == "gpt2":
        model: Any = GPT2LMHeadModel(GPT2Config(**{**GPT2, **changes}))
    elif family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes}))
    else:
        model = MistralForCausalLM(MistralConfig(**{**SIZES, "sliding_window": 24, **changes}))
    model.eval().set_attn_implementation(implementation)
    return model


llama, gpt2, mistral = (partial(_made, family) for family in ("llama", "gpt2", "mistral"))
MODELS = {"llama": llama, "gpt2": gpt2, "mistral": mistral}
"""Each makes its model under an implementation, of a seed, with other settings."""


def ids(batch: int, count: int, seed: int = 1) -> Tensor:
    return torch.randint(VOCAB, (batch, count), generator=torch.Generator().manual_seed(seed))


def run(model: Any, tokens: Tensor, cache: Any, *lengths: int, mask: Tensor | None = None) -> Tensor:
    """Logits of the tokens behind those that a cache holds, or of all without one, in calls of these lengths."""
    at = 0 if cache is None else int(cache.get_seq_length())
    parts = []
    for length in lengths:
        more: dict[str, Any] = {}
        if mask is not None:
            positions = (mask.cumsum(1) - 1).clamp_min(0)
            more = {"attention_mask": mask[:, : at + length], "position_ids": positions[:, at : at + length]}
        with torch.no_grad():
            parts.append(model(tokens[:, at : at + length], past_key_values=cache, **more).logits)
        at += length
    return torch.cat(parts, dim=1)
