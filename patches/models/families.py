"""What is known about model families that their configurations do not tell, one set of families per fact."""

import functools
import importlib
import inspect
import re
from typing import Any

import torch

ENCODER_ONLY = frozenset((
    "albert", "bert", "camembert", "convbert", "data2vec-text", "distilbert", "electra", "ernie", "esm", "eurobert",
    "flaubert", "ibert", "jina_embeddings_v3", "mobilebert", "modernbert", "mpnet", "nomic_bert", "roberta",
    "roberta-prelayernorm", "roc_bert", "roformer", "splinter", "xlm-roberta", "xlm-roberta-xl", "xmod",
))  # fmt: skip
"""They keep no keys and values from call to call, unless they are configured as a decoder."""
DENSE_MASK = frozenset((
    "axk2", "deepseek_v32", "dots3_note", "glm_moe_dsa", "granite_speech5", "hy_v4", "mistral_large4",
    "nemotron_asr_streaming", "parakeet", "pix2struct", "qwen4_exp", "sam3", "sam3_lite_text", "swin", "beit",
    "gpt_bigcode", "granite4_vision", "siglip2", "diffusion_gemma",
))  # fmt: skip
"""Their models slice or combine the prepared mask and need a tensor."""
LOSES_BORDERS = frozenset(("afmoe", "biogpt", "gpt_oss", "nemotron", "opt", "stablelm"))
"""Their models make masks without positions, or do not pass `cu_seq_lens_*` to attention: what their caller told of
documents is looked up, and they begin where positions fall back."""
NUMBERS_TOKENS = frozenset(("biogpt", "opt"))
"""Their models number the real tokens of a padded batch, and not its columns."""
COMPUTES_WITH_CACHE = frozenset(("cpmant", "diffllama", "doge", "jetmoe"))
"""Their models compute with what their cache hands to them before attention does, which codes are not for."""
UNROUTED = {
    "bigbird_pegasus": "adds the attention mask to scores of its own in the encoder",
    "deepseek_v4": "extends the mask by scores of its own",
    "inkling2": "gives every token attention sinks of its own",
    "inkling2_loop": "gives every token attention sinks of its own",
}
"""How a part of their models bypasses Transformers' attention interface, where its source does not show it."""

_ATTENTION_CLASS = re.compile(r"^class \w*Attention\w*\(nn\.Module\):", re.MULTILINE)


def family_of(config: Any) -> str:
    """Returns the name of a configuration's family, by which this module's sets know it."""
    # called in every forward pass: class attributes are ten times as fast as `PretrainedConfig.__getattribute__`
    model_type: str = getattr(type(config), "model_type", "") or getattr(config, "model_type", "")
    return model_type.removesuffix("_text")


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
def refusal_of(config_class: type) -> str | None:
    """Returns why models of a configuration's class are not supported, None if they are.

    So are models whose modeling file has no attention of its own, and remote code whose file is not found.
    """
    return _refusal_of(config_class)


@functools.cache
def _refusal_of(config_class: Any) -> str | None:
    name = config_class.__name__
    if unrouted := UNROUTED.get(family_of(config_class)):
        return unsupported(name, unrouted)
    module = config_class.__module__.replace("configuration_", "modeling_")  # beside the configuration's own
    try:
        source = "" if module == config_class.__module__ else inspect.getsource(importlib.import_module(module))
    except (ImportError, OSError):
        return None
    if not _ATTENTION_CLASS.search(source):
        return None
    if "_CLASSES[" in source:
        return unsupported(name, "looks its attention up in a table of its own")
    if "ALL_ATTENTION_FUNCTIONS" in source:
        return None
    if config_class.sub_configs:
        return unsupported(name, "computes the attention of a part of the model by itself")
    return unsupported(name)
