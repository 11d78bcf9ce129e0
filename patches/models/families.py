"""What is known about model families that their configurations do not tell, one record per family."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Family:
    """Facts of one `config.model_type`.

    Attributes:
        encoder_only: The family keeps no keys and values from call to call, unless it is configured as a decoder.
        dense_mask: The model slices or combines the prepared mask and needs a tensor.
        loses_borders: The model makes its masks without positions, or does not pass `cu_seq_lens_*` to attention;
            what its caller told of documents is looked up, and they begin where positions fall back.
        numbers_tokens: The model numbers the real tokens of a padded batch, and not its columns.
        computes_with_cache: The model computes with what its cache hands to it before attention does, which codes are
            not for.
        unrouted: How a part of the model bypasses Transformers' attention interface, where its source does not show
            it; empty if none does.
    """

    encoder_only: bool = False
    dense_mask: bool = False
    loses_borders: bool = False
    numbers_tokens: bool = False
    computes_with_cache: bool = False
    unrouted: str = ""


_FACTS = {
    "encoder_only": """
        albert bert camembert convbert data2vec-text distilbert electra ernie esm eurobert flaubert ibert
        jina_embeddings_v3 mobilebert modernbert mpnet nomic_bert roberta roberta-prelayernorm roc_bert roformer
        splinter xlm-roberta xlm-roberta-xl xmod
        """,
    "dense_mask": """
        axk2 deepseek_v32 dots3_note glm_moe_dsa granite_speech5 hy_v4 mistral_large4
        nemotron_asr_streaming parakeet pix2struct qwen4_exp sam3 sam3_lite_text swin beit gpt_bigcode granite4_vision
        siglip2 diffusion_gemma
        """,
    "loses_borders": "afmoe biogpt gpt_oss nemotron opt stablelm",
    "numbers_tokens": "biogpt opt",
    "computes_with_cache": "cpmant diffllama doge jetmoe",
}
_UNROUTED = {
    "bigbird_pegasus": "adds the attention mask to scores of its own in the encoder",
    "deepseek_v4": "extends the mask by scores of its own",
    "inkling2": "gives every token attention sinks of its own",
    "inkling2_loop": "gives every token attention sinks of its own",
}
FAMILIES: dict[str, Family] = {
    name: Family(**{fact: name in names.split() for fact, names in _FACTS.items()}, unrouted=_UNROUTED.get(name, ""))
    for name in sorted({*" ".join(_FACTS.values()).split(), *_UNROUTED})
}
_ORDINARY = Family()
ATTENTION_CLASS = re.compile(r"^class \w*Attention\w*\(nn\.Module\):", re.MULTILINE)


def family_of(config: Any) -> Family:
    """Returns the record of a configuration's family; an ordinary one where there is none."""
    # called in every forward pass: class attributes are ten times as fast as `PretrainedConfig.__getattribute__`
    model_type = getattr(type(config), "model_type", "") or getattr(config, "model_type", "")
    return FAMILIES.get(model_type.removesuffix("_text"), _ORDINARY)


class UnsupportedModel(ValueError):
    """The model computes attention itself: no implementation can be chosen by name."""


def unsupported(who: str, how: str = "") -> str:
    """Returns the message for a model that is not supported."""
    how = how or "does not route its attention through Transformers' attention interface"
    return (
        f"attn_implementation: got 'adaattn' for {who}, which {how}, so that no implementation can be "
        "chosen by name; load it with attn_implementation='eager'"
    )


@torch.compiler.assume_constant_result
def uses_interface(config_class: type) -> bool:
    """Whether the modeling file beside a configuration class uses Transformers' attention interface.

    True for one that has no attention of its own, and for remote code whose modeling file is not found.
    """
    source = modeling_source(config_class)
    return source is None or "ALL_ATTENTION_FUNCTIONS" in source or not ATTENTION_CLASS.search(source)


@functools.cache
def modeling_source(config_class: type) -> str | None:
    """Returns the source of the modeling file beside a configuration class, None if there is no such file."""
    name = config_class.__module__.replace("configuration_", "modeling_")
    if name == config_class.__module__:
        return None
    try:
        return inspect.getsource(importlib.import_module(name))
    except (ImportError, OSError):
        return None
