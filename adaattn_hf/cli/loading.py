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
from ..calibration.settings import Masking


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


def opened(name: str, **source: Any) -> Opened:
    """Returns a checkpoint's tokenizer and positions; its weights stay where they are.

    Args:
        name: Hub id or directory.
        **source: `revision`, `gguf_file` and `trust_remote_code`, those that are given.

    Raises:
        ValueError: If it cannot be read.
    """
    try:
        config = checkpoint.read_config(name, **source)
        tokenizer = AutoTokenizer.from_pretrained(name, **source)
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


def load(name: str, *, dtype: str, masking: Masking | None = None, **source: Any) -> Loaded:
    """Returns a checkpoint with the language-model head that it was saved with, on the CPU.

    Args:
        name: Hub id or directory.
        dtype: `float32`, `bfloat16`, `float16` or `auto`, the checkpoint's own.
        masking: How a masked-language model is read.
        **source: As for `opened`.

    Raises:
        ValueError: If it cannot be loaded, or lacks the weights of its head.
    """
    try:
        found = checkpoint.load(name, dtype=dtype, device="cpu", implementation="adaattn", **source)
    except EvalError as error:
        raise ValueError(str(error)) from error
    tokenizer = found.tokenizer
    if found.objective != "masked":
        return Loaded(found.model, _encoder(tokenizer), NEXT_TOKEN)
    read = masking or Masking()
    scoring = MaskedTokens.of(tokenizer, read.mask_share, read.maskings)
    return Loaded(found.model, _encoder(tokenizer), scoring)
