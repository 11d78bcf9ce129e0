"""Registers the attention names `adaattn` and `adaattn_<backend>` with Transformers; replaces nothing there."""

from __future__ import annotations

import os
import warnings
from types import MappingProxyType

from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from adaattn_hf.backends.select import BACKENDS, possible
from adaattn_hf.config import use_presets
from adaattn_hf.errors import unknown

from .call.batching import batch_function, engine_name
from .call.interface import attention_function
from .mask.masks import adaattn_mask

NAMES = MappingProxyType({"adaattn": None, **{f"adaattn_{name}": name for name in BACKENDS}})
"""Maps each `attn_implementation` to the backend that it forces, or to None where one is chosen per kind of call."""


def resolve(name: str) -> str | None:
    """Returns the backend that a registered `attn_implementation` forces, None where one is chosen per kind of call.

    Raises:
        ValueError: The name is not one of `NAMES`; the message lists them and the nearest.
    """
    if name not in NAMES:
        raise ValueError(unknown("attn_implementation", name, NAMES))
    return NAMES[name]


def _say_what_left() -> None:
    """Warns of a setting of earlier versions that would otherwise be ignored in silence."""
    if asked := os.environ.get("ADAATTN_TUNE"):
        warnings.warn(
            f"ADAATTN_TUNE: got {asked!r}, expected no such variable: backends are no longer measured on each machine, "
            "and calls go by the built-in order; unset it, and delete the tables of earlier "
            "versions (adaattn_hf/tuned-*.json in XDG_CACHE_HOME, else in ~/.cache)",
            stacklevel=3,
        )


def _budget_of(preset: str) -> float:
    """Budget of a preset, whose file is read when settings first name it."""
    from adaattn_hf.presets import budget_of

    return budget_of(preset)


def register(*, impossible: bool = False) -> None:
    """Register the names with Transformers in this process. May be called again.

    A backend that can serve nothing here has no name, so that Transformers refuses it when a model is loaded or set to
    it: one for CUDA beside a torch that was built without, or one whose package is not installed. `check` says why.

    Args:
        impossible: Register those names, too: to explain what a model would run elsewhere.
    """
    _say_what_left()
    use_presets(_budget_of)
    for name, backend in NAMES.items():
        if not (impossible or backend is None or possible(backend)):
            continue
        AttentionInterface.register(name, attention_function(backend))
        # without a mask function under the same name Transformers silently ignores padding
        AttentionMaskInterface.register(name, adaattn_mask)
        # no mask function under this name: requests are told apart by their lengths
        AttentionInterface.register(engine_name(name), batch_function(backend))


def unregister() -> None:
    """Remove the names again; models that are set to one of them can no longer run."""
    for name in NAMES:
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)
        AttentionInterface._global_mapping.pop(engine_name(name), None)
