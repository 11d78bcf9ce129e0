"""Tiny models, one set of weights under each implementation, shared by a process; and all families by every door."""

from functools import cache
from typing import Any

import torch
import transformers as tf
from hypothesis import strategies as st
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from adaattn_hf import PrepareError, prepare
from adaattn_hf.patches.models.families import LOSES_BORDERS
from tests.support.families import LISTED, configured, models
from tests.support.kernels import kernel

DECODERS: dict[str, dict[str, Any]] = LISTED["decoders"]
ENCODERS: dict[str, dict[str, Any]] = {"bert": {}, **LISTED["encoders"]}
_SHARED: dict[str, Any] = {
    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 5, "head_dim": 8, "global_head_dim": 8, "num_global_key_value_heads": 2,
    "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8,
}  # fmt: skip
SHARING: dict[str, dict[str, Any]] = {"gemma4_text": _SHARED}
"""Families whose last layers read the keys of others, and compute no other rows than those that are kept."""
BORDERLESS = tuple(sorted(LOSES_BORDERS))
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
    if family not in ENCODERS:
        return tf.AutoModelForCausalLM, (DECODERS | SHARING)[family]
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


@st.composite
def any_family(draw: st.DrawFn) -> str:
    from tests.conformance import survey

    listed = {name for names in survey.KINDS.values() for name in names}
    return str(draw(st.sampled_from(sorted(listed.intersection(CONFIG_MAPPING)))))


def judge_family(name: str) -> str:
    """`served`, `refused` at some door in words, or `refused as by stock`, of which no tiny model runs."""
    from tests.conformance import survey

    found = survey.surveyed(name)
    raw = survey.raw({name: found})
    assert not raw, "; ".join(raw)
    late = found.get("check") == found.get("load") == survey.YES and not found.get("forward", "").startswith("as stock")
    forward = found.get("forward", survey.YES)
    assert not late or forward == survey.YES, f"check lets pass what ends in {forward}"
    if "untried" in found:
        return "refused as by stock"
    doors = ("check", "load", "forward", "explain", "generate", "prepare")
    return "served" if all(found.get(door, survey.YES) == survey.YES for door in doors) else "refused"
