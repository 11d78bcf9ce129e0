"""Which models take no attention implementation by name, and the sentence that says so.

Transformers accepts a registered name for every model, also for those whose code computes attention by
itself. Some of these then ask the mask function for a mask and are refused there; some look the name up in a
table of their own and raise a bare `KeyError`; some never ask and would run their own attention in silence.
`check` finds all three.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from .families import family_of

__all__ = ["UnsupportedModel", "check", "refusal_of", "unsupported", "uses_interface"]

_OWN_TABLE = re.compile(r"_CLASSES\[")
_ATTENTION_CLASS = re.compile(r"^class \w*Attention\w*\(nn\.Module\):", re.MULTILINE)


class UnsupportedModel(ValueError):
    """The model computes attention by itself: no implementation can be chosen by name."""


def unsupported(
    who: str, how: str = "does not route its attention through Transformers' attention interface"
) -> str:
    """The sentence that refuses a model."""
    return (
        f"attn_implementation: got 'adaattn' for {who}, which {how}, so that no implementation can be "
        "chosen by name; load it with attn_implementation='eager'"
    )


def check(model: PreTrainedModel | PreTrainedConfig) -> None:
    """Raise if a model would not run on adaattn, though Transformers accepts the name for it.

    Args:
        model: A model, or the configuration of one that is not loaded yet. Of a model, the towers that are
            set to another implementation are not looked at.

    Raises:
        UnsupportedModel: A part of the model computes attention by itself.
    """
    for config in _configs(model):
        reason = refusal_of(config)
        if reason is not None:
            raise UnsupportedModel(reason)


def refusal_of(config: PreTrainedConfig | type[PreTrainedConfig]) -> str | None:
    """The sentence that refuses models of a configuration (or its class), None if they are served."""
    config_class: Any = config if isinstance(config, type) else type(config)
    name = config_class.__name__
    family = family_of(config)
    if family is not None and family.unrouted:
        return unsupported(name, family.unrouted)
    source = _modeling_source(config_class)
    if source is None or not _ATTENTION_CLASS.search(source):
        return None
    if _OWN_TABLE.search(source):
        return unsupported(name, "looks its attention up in a table of its own")
    if "ALL_ATTENTION_FUNCTIONS" in source:
        return None
    if config_class.sub_configs:
        return unsupported(name, "computes the attention of a part of the model by itself")
    return unsupported(name)


def _configs(model: PreTrainedModel | PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Configurations of all towers; of a model, of those that run under one of our names."""
    if isinstance(model, PreTrainedConfig):
        yield model
        for name in model.sub_configs:
            tower = getattr(model, name, None)
            if isinstance(tower, PreTrainedConfig):
                yield from _configs(tower)
        return
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and str(module.config._attn_implementation).startswith(
            "adaattn"
        ):
            yield module.config


@torch.compiler.assume_constant_result
def uses_interface(config_class: type) -> bool:
    """Whether the modeling file beside a configuration class asks the attention interface for its function.

    Remote code that keeps its classes elsewhere is taken at its word.
    """
    source = _modeling_source(config_class)
    return source is None or "ALL_ATTENTION_FUNCTIONS" in source


@functools.cache
def _modeling_source(config_class: type) -> str | None:
    """Source of the modeling file beside a configuration class; None if there is no such file."""
    name = config_class.__module__.replace("configuration_", "modeling_")
    if name == config_class.__module__:
        return None
    try:
        return inspect.getsource(importlib.import_module(name))
    except (ImportError, OSError):
        return None
