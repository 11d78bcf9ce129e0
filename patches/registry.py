"""Our names in Transformers' registries. Nothing of Transformers is replaced."""

from __future__ import annotations

import difflib
from types import MappingProxyType

from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from adaattn_hf.backends.select import BACKENDS

from .interface import attention_function
from .masks import adaattn_mask
from .paged import engine_takes_names, paged_function

__all__ = ["NAMES", "register", "resolve", "unregister"]

NAMES = MappingProxyType({"adaattn": None, **{f"adaattn_{name}": name for name in BACKENDS}})
"""`attn_implementation` -> backend that the name forces, None where one is chosen."""


def resolve(name: str) -> str | None:
    """The backend that an `attn_implementation` of ours forces, None where one is chosen.

    Raises:
        ValueError: No name of ours; lists them and the nearest.
    """
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"attn_implementation: got {name!r}, AdaAttn's names are {', '.join(NAMES)}.{hint}")
    return NAMES[name]


def register() -> None:
    """Make the names known to Transformers, in this process. Harmless when repeated."""
    for name, backend in NAMES.items():
        AttentionInterface.register(name, attention_function(backend))
        # without a mask function of the same name Transformers drops padding in silence
        AttentionMaskInterface.register(name, adaattn_mask)
        if engine_takes_names():
            # with a mask function of this name the engine would ask it for a mask of the wrong size
            AttentionInterface.register(f"paged|{name}", paged_function(backend))


def unregister() -> None:
    """Take the names out again; models that carry them can no longer run."""
    for name in NAMES:
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)
        AttentionInterface._global_mapping.pop(f"paged|{name}", None)
