"""Detects models that cannot run another attention implementation, and says so in one sentence.

Transformers accepts a registered name for every model, even if the model's code computes attention itself. Some of
these models call the mask function and are refused there; some look the name up in a table of their own and raise a
bare `KeyError`; some ignore the name and silently run their own attention. `check` finds all three.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
import transformers as tf
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from adaattn_hf.backends.select import check_may_run_here
from adaattn_hf.config import settings_in

from .families import UnsupportedModel, refusal_of
from .positions import configs_of

if TYPE_CHECKING:
    from transformers import Pipeline

Holder: TypeAlias = "nn.Module | Pipeline"
"""A model, or what holds models: a pipeline, PEFT, sentence-transformers."""
Model = TypeVar("Model", bound=Holder)
"""The same, of a function that changes it and returns it."""


def is_ours(implementation: Any) -> bool:
    """Whether the name of an attention implementation is one of this package's."""
    return isinstance(implementation, str) and implementation.removeprefix("paged|").startswith("adaattn")


def model_in(holder: Any) -> Any:
    """Returns the model of what holds one and is none itself, such as a pipeline; anything else as it is."""
    model = None if isinstance(holder, (nn.Module, type)) else getattr(holder, "model", None)
    return model if isinstance(model, nn.Module) else holder


def unloaded(source: Any, implementation: str = "adaattn") -> Any:
    """Returns the model of a configuration, directory or Hub id on the meta device; no weights are read."""
    config = tf.AutoConfig.from_pretrained(source) if isinstance(source, (str, Path)) else source
    saved, kind = " ".join(config.architectures or []), type(config)
    unnamed = not saved and kind in tf.MODEL_FOR_CAUSAL_LM_MAPPING and kind not in tf.MODEL_FOR_MASKED_LM_MAPPING
    auto: Any = tf.AutoModelForMaskedLM if "ForMaskedLM" in saved else tf.AutoModel
    if unnamed or "ForCausalLM" in saved or "LMHeadModel" in saved:  # a GGUF file names no class
        auto = tf.AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(config, attn_implementation=implementation).eval()


def towers_of(model: nn.Module, path: str = "") -> Iterator[tuple[str, PreTrainedModel]]:
    """Yields Transformers models that are not part of another one, with their names in the model that holds them."""
    if isinstance(model, PreTrainedModel):
        yield path, model
        return
    for name, child in model.named_children():
        yield from towers_of(child, f"{path}.{name}".strip("."))


def implementations(model: nn.Module) -> set[str]:
    """Returns the attention implementations of a model's towers."""
    names = {getattr(config, "_attn_implementation", None) for config in configs_of(model.modules())}
    return {name for name in names if isinstance(name, str)}


def runs_ours(model: nn.Module) -> bool:
    """Whether a tower of a model is set to one of this package's implementations."""
    return any(map(is_ours, implementations(model)))


def refuse_no_model(model: Any, *others: type) -> None:
    """Refuses what is no model, such as the name of one; `others` are welcome, too (TypeError)."""
    if not isinstance(model, (nn.Module, *others)):
        raise TypeError(
            f"model: got {model!r:.80}, expected a loaded model{' or its configuration' * bool(others)}; load it with "
            'AutoModel.from_pretrained(name, attn_implementation="adaattn")'
        )


def check(model: Holder | PreTrainedConfig) -> None:
    """Raise if a model would not run on adaattn, though Transformers accepts the name for it.

    Args:
        model: A model, what holds one (a pipeline, PEFT, sentence-transformers), or the configuration of one that is
            not loaded yet. Towers of a model that are set to another implementation are not checked.

    Raises:
        UnsupportedModel: A part of the model computes attention itself.
        BackendRefusal: The backend that its name or settings force can serve no call on this machine.
        TypeError: It is none of these.
    """
    root = model_in(model)
    refuse_no_model(root, PreTrainedConfig)
    for config in _configs(root):
        if (reason := refusal_of(type(config))) is not None:
            raise UnsupportedModel(reason)
        name = str(config._attn_implementation)
        forced = name.removeprefix("adaattn_") if name.startswith("adaattn_") else settings_in(config).backend
        if forced is not None:
            check_may_run_here(forced)


def refuse_other_attention(model: nn.Module, error: type[ValueError] = ValueError) -> None:
    """Refuses a model whose attention is not this package's (`error`)."""
    refuse_no_model(model)
    names = implementations(model)
    if not runs_ours(model):
        raise error(
            f"model: its attention implementation is {', '.join(map(repr, sorted(names))) or 'unknown'}, not one of "
            'AdaAttn\'s; load it with attn_implementation="adaattn" or call '
            'model.set_attn_implementation("adaattn")'
        )


def _configs(model: nn.Module | PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    # of all towers; of a model, only of those that are set to `adaattn…`
    if isinstance(model, PreTrainedConfig):
        yield model
        for name in model.sub_configs:
            tower = getattr(model, name, None)
            if isinstance(tower, PreTrainedConfig):
                yield from _configs(tower)
        return
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and is_ours(module.config._attn_implementation):
            yield module.config
