"""Loads a checkpoint for calibration: the model with its head, its tokenizer, and what it is scored on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import AutoTokenizer

from adaattn_hf.errors import ModelUnavailable
from adaattn_hf.patches import checkpoint
from adaattn_hf.patches.plans.positions import stated_positions

from ..calibration.scoring import NEXT_TOKEN, MaskedTokens, Scoring
from ..calibration.settings import Masking

Encode = Callable[[str], Sequence[int]]
"""Text to token ids, without special tokens."""


@dataclass(frozen=True)
class Loaded:
    """What a calibration needs of a checkpoint: the model in evaluation mode, text to ids, what it is scored on."""

    model: nn.Module
    encode: Encode
    scoring: Scoring


def opened(name: str, **source: Any) -> tuple[Encode, int | None]:
    """Returns a checkpoint's tokenizer, and the most tokens that its configuration allows, None where it does not say.

    Raises:
        ModelUnavailable: If it cannot be read.
    """
    config = checkpoint.read_config(name, **source)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **source)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelUnavailable(
            f"tokenizer: that of {name!r} cannot be loaded: {checkpoint.why_not(name, error)}"
        ) from error
    return _encoder(tokenizer), stated_positions(config)


def _encoder(tokenizer: Any) -> Encode:
    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return ids

    return encode


def load(name: str, *, dtype: str, masking: Masking | None = None, **source: Any) -> Loaded:
    """Returns a checkpoint with the language-model head that it was saved with, on the CPU.

    Raises:
        ModelUnavailable: If it cannot be loaded, or lacks the weights of its head.
    """
    found = checkpoint.load(name, dtype=dtype, device="cpu", implementation="adaattn", **source)
    scoring: Scoring = NEXT_TOKEN
    if found.objective == "masked":
        read = masking or Masking()
        scoring = MaskedTokens.of(found.tokenizer, read.mask_share, read.maskings)
    return Loaded(found.model, _encoder(found.tokenizer), scoring)
