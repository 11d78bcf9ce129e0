"""Loads a checkpoint for calibration: the model with its head, its tokenizer, and what it is scored on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import AutoTokenizer

from adaattn_hf.errors import EvalError
from adaattn_hf.patches import checkpoint
from adaattn_hf.patches.plans.positions import stated_positions

from ..calibration.scoring import NEXT_TOKEN, MaskedTokens, Scoring


@dataclass(frozen=True)
class Loaded:
    """What a calibration needs of a checkpoint.

    Attributes:
        model: With `attn_implementation="adaattn"`, in evaluation mode.
        encode: Text to token ids, without special tokens.
        scoring: What the model is scored on.
    """

    model: nn.Module
    encode: Callable[[str], Sequence[int]]
    scoring: Scoring


@dataclass(frozen=True)
class Opened:
    """What is known of a checkpoint before its weights are read.

    Attributes:
        encode: Text to token ids, without special tokens.
        positions: Most tokens that the model reads by its configuration, `None` where it does not say.
    """

    encode: Callable[[str], Sequence[int]]
    positions: int | None


def opened(name: str, gguf_file: str | None = None) -> Opened:
    """Returns a checkpoint's tokenizer and positions; its weights stay where they are.

    Raises:
        ValueError: If it cannot be read.
    """
    extra = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        config = checkpoint.read_config(name, **extra)
        tokenizer = AutoTokenizer.from_pretrained(name, **extra)
    except EvalError as error:
        raise ValueError(str(error)) from error
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(
            f"tokenizer: that of {name!r} cannot be loaded: {checkpoint.why_not(name, error)}"
        ) from error
    return Opened(_encoder(tokenizer), stated_positions(config))


def _encoder(tokenizer: Any) -> Callable[[str], Sequence[int]]:
    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return ids

    return encode


def load(
    name: str,
    *,
    dtype: str = "auto",
    gguf_file: str | None = None,
    mask_share: float = 0.15,
    maskings: int = 4,
) -> Loaded:
    """Returns a checkpoint with the language-model head that it was saved with, on the CPU.

    Args:
        name: Hub id or directory.
        dtype: `float32`, `bfloat16`, `float16` or `auto`, the checkpoint's own.
        gguf_file: GGUF file within `name`.
        mask_share: Share of the tokens that a reading of a masked-language model masks.
        maskings: Readings of each sequence.

    Raises:
        ValueError: If it cannot be loaded, or lacks the weights of its head.
    """
    try:
        found = checkpoint.load(
            name, dtype=dtype, device="cpu", gguf_file=gguf_file, implementation="adaattn"
        )
    except EvalError as error:
        raise ValueError(str(error)) from error
    tokenizer = found.tokenizer
    scoring = MaskedTokens.of(tokenizer, mask_share, maskings) if found.objective == "masked" else NEXT_TOKEN
    return Loaded(found.model, _encoder(tokenizer), scoring)
