"""The caches that are set beside one another, and models shaped like others with random weights to hold them."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import DynamicCache, QuantizedCache, StaticCache

from adaattn_hf.patches.cache.caches import AdaAttnCache
from adaattn_hf.patches.cache.formats import FORMATS

from .cache_text import STOCK, Arm, read
from .front import jobs

TRIED = (ImportError, ValueError, RuntimeError, AttributeError, AssertionError, TypeError, KeyError)
"""What other libraries raise beside versions that they do not know, and devices that are full."""
PROMPT = 128
"""Tokens that are read at once in the trial; some presses ask for more than 64."""


def _quantised(backend: str, **options: int) -> Callable[[Any, int], Any]:
    return lambda model, room: QuantizedCache(backend, model.config, **options)


def _ours(stored: str) -> Callable[[Any, int], Any]:
    return lambda model, room: AdaAttnCache(model, stored, reserve=room)


def _dynamic(model: Any, room: int) -> DynamicCache:
    return DynamicCache(config=model.config)


def _pressed(press: str, dropped: float, words: str) -> Arm:
    """A press of kvpress that drops a share of a prompt's tokens."""

    def make() -> Any:
        return getattr(importlib.import_module("kvpress"), f"{press}Press")(compression_ratio=dropped)

    return Arm(f"kvpress {press}, {words}", "sdpa", _dynamic, 1 - dropped, make)


OURS = {f"AdaAttnCache {stored}": stored for stored in FORMATS}
"""What each of this package's caches stores."""
PRESSES = ("Knorm", "SnapKV", "ExpectedAttention")
ARMS = (
    Arm(STOCK, "sdpa", _dynamic),
    Arm("StaticCache", "sdpa", lambda model, room: StaticCache(config=model.config, max_cache_len=room)),
    Arm("QuantizedCache fp8", "sdpa", _quantised("fp8")),
    Arm("QuantizedCache quanto, 4 bits", "sdpa", _quantised("quanto", nbits=4)),
    Arm("QuantizedCache hqq, 8 bits", "sdpa", _quantised("hqq", nbits=8, axis_key=1, axis_value=1)),
    *(_pressed(press, 0.5, "half") for press in PRESSES),
    *(Arm(name, "adaattn", _ours(stored)) for name, stored in OURS.items()),
)
SHARES = {0.25: "a quarter dropped", 0.75: "three quarters dropped"}
READ = (*ARMS, *(_pressed(press, share, words) for press in PRESSES for share, words in SHARES.items()))
"""The arms that read text: more shares than are timed."""


def present(model: Any, arms: Sequence[Arm], skipped: Sequence[str]) -> tuple[list[Arm], dict[str, str]]:
    """Returns the arms that run here, and of the others why not: each reads a few tokens, under its press.

    Args:
        model: Any causal LM.
        arms: Those to try.
        skipped: Words in the names of arms that are left out; never the one that the others are compared with.
    """
    found, absent = [], {}
    tokens = torch.arange(PROMPT + 1, device=model.device) % model.config.vocab_size
    for arm in arms:
        if arm.name != STOCK and any(word in arm.name for word in skipped):
            absent[arm.name] = "left out"
            continue
        try:
            read(model, arm, tokens, PROMPT)
            found.append(arm)
        except TRIED as error:
            if arm.name in OURS:
                raise
            absent[arm.name] = f"{type(error).__name__}: {error}".split("\n")[0][:200]
    return found, absent


SHAPES = {
    "1b": ("LLaMA-3.2-1B", {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                            "tie_word_embeddings": True}),
    "8b": ("LLaMA-3.1-8B", {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}),
    "1.5b": ("Qwen2.5-1.5B", {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
                              "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936,
                              "tie_word_embeddings": True}),
    "tiny": ("a trial", {"hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64,
                         "head_dim": 64}),
}  # fmt: skip
"""Models with random weights: whose shape they have, and what of it differs from one to the next."""


def shaped(shape: str, device: torch.device) -> Any:
    """A model of SHAPES in bfloat16, made on the device."""
    llama = {"vocab_size": 128256, "num_attention_heads": 32, "num_key_value_heads": 8}
    return jobs.shaped({**llama, **SHAPES[shape][1], "max_position_embeddings": 1 << 18}, device)


def weights_read(model: Any) -> int:
    """Bytes of the weights that a decode step in bfloat16 reads: all but an embedding that is no output layer."""
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    looked_up = 0 if embedding is output else embedding.numel()  # a row of it for each token
    return 2 * (sum(int(weight.numel()) for weight in model.parameters()) - int(looked_up))
