"""A checkpoint for calibration: the model with its own head, its text encoder, and what it is scored on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
)

import adaattn_hf  # noqa: F401  registers the name
from adaattn_hf.calibration.scoring import NEXT_TOKEN, MaskedTokens, Scoring
from adaattn_hf.eval.checkpoint import why_not


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


def load(
    name: str,
    *,
    dtype: str = "auto",
    gguf_file: str | None = None,
    mask_share: float = 0.15,
    maskings: int = 4,
) -> Loaded:
    """Returns a checkpoint with the language-model head that it was saved with.

    Args:
        name: Hub id or directory.
        dtype: `float32`, `bfloat16`, `float16` or `auto`, the checkpoint's own.
        gguf_file: GGUF file within `name`.
        mask_share: Share of the tokens that a reading of a masked-language model masks.
        maskings: Readings of each sequence.

    Raises:
        ValueError: If it cannot be loaded, or lacks the weights of its head.
    """
    found = dtype if dtype == "auto" else getattr(torch, dtype, None)
    if found is None:
        raise ValueError(f"dtype is {dtype!r}, expected float32, bfloat16, float16 or auto")
    extra = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        config = AutoConfig.from_pretrained(name, **extra)
        masked = is_masked(config)
        auto = AutoModelForMaskedLM if masked else AutoModelForCausalLM
        tokenizer = AutoTokenizer.from_pretrained(name, **extra)
        result: Any = auto.from_pretrained(
            name, attn_implementation="adaattn", dtype=found, output_loading_info=True, **extra
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"model: {name!r} cannot be loaded: {why_not(name, error)}") from error
    model, report = result
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(
            f"model: got {name!r}, saved as {', '.join(config.architectures or ['nothing that its config names'])} "
            f"without {len(missing)} weights of its language-model head ({missing[0]}, …), expected a checkpoint saved "
            "with its head (…ForMaskedLM, …ForCausalLM): without predictions there is no loss to keep a budget of. "
            "Calibrate the checkpoint that this one was taken from; if the weights are the same, "
            "adaattn_hf.load_plan(model, directory) gives its plan to this one"
        )

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return ids

    scoring = MaskedTokens.of(tokenizer, mask_share, maskings) if masked else NEXT_TOKEN
    return Loaded(model, encode, scoring)


def is_masked(config: Any) -> bool:
    """Whether a configuration is of a masked-language model: as saved, or by its family for a bare encoder."""
    saved = config.architectures or []
    if any(name.endswith("ForMaskedLM") for name in saved):
        return True
    if any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in saved):
        return False
    return type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)
