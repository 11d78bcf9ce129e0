"""Tiny models of every family, one set of weights under each implementation, shared by all draws of a process."""

from functools import cache
from typing import Any

import torch
import transformers as tf
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from adaattn_hf import PrepareError, prepare
from adaattn_hf.patches.models.families import FAMILIES
from tests.support.families import LISTED, configured, models
from tests.support.kernels import kernel

DECODERS: dict[str, dict[str, Any]] = LISTED["decoders"]
ENCODERS: dict[str, dict[str, Any]] = {"bert": {}, **LISTED["encoders"]}
BORDERLESS = tuple(sorted(name for name, family in FAMILIES.items() if family.loses_borders))
"""Families that lose the borders of documents on the way from positions to attention."""
ROUTES = ("moe", "oss", "afmoe", "mixtral", "llama4", "minimax", "mimo", "doge", "jetmoe")
"""Parts of the names of families that send a token where one rounding more may send it elsewhere."""
KERNEL = "hub_adaattn"
"""Name under which the kernel of `hub/adaattn` is registered, as Transformers' loader registers it."""


def register_kernel() -> None:
    AttentionInterface.register(KERNEL, kernel("adaattn").flash_attn_forward)
    AttentionMaskInterface.register(KERNEL, sdpa_mask)


def class_of(family: str) -> Any:
    """The class of a family's models: one that predicts tokens, else the encoder itself."""
    auto, changes = recipe(family)
    found = auto._model_mapping[type(configured(family, changes))]
    return found[0] if isinstance(found, (list, tuple)) else found


def recipe(family: str) -> tuple[Any, dict[str, Any]]:
    if family in DECODERS:
        return tf.AutoModelForCausalLM, DECODERS[family]
    return tf.AutoModel, ENCODERS[family]


@cache
def offers(family: str, implementation: str) -> bool:
    """Whether Transformers lets a family have an implementation: it looks for the letters sdpa in its name."""
    return "sdpa" not in implementation or class_of(family)._supports_sdpa


@cache
def twin(family: str, implementation: str, dtype: torch.dtype = torch.float32, prepared: bool = False) -> Any:
    if implementation == KERNEL:
        register_kernel()
    auto, changes = recipe(family)
    model = models(family, changes, auto, implementation).ours.to(dtype).requires_grad_(False)
    if prepared:
        try:
            prepare(model)
        except PrepareError:
            prepare(model, unpad=False)
    return model
