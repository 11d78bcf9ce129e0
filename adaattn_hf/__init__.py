"""Faster attention for Transformers models by one string: `attn_implementation="adaattn"`.

Importing the package registers the names and does nothing else.
"""

from __future__ import annotations

from .config import AdaAttnConfig, ConfigError
from .patches import (
    NAMES,
    Explanation,
    GrowingCache,
    PrepareError,
    UnsupportedModel,
    check,
    configure,
    explain,
    prepare,
    register,
    resolve,
    restore,
    unpad_calls,
    unregister,
)
from .presets import load_preset, preset_names

__all__ = [
    "NAMES",
    "AdaAttnConfig",
    "ConfigError",
    "Explanation",
    "GrowingCache",
    "PrepareError",
    "UnsupportedModel",
    "__version__",
    "check",
    "configure",
    "explain",
    "load_preset",
    "prepare",
    "preset_names",
    "register",
    "resolve",
    "restore",
    "unpad_calls",
    "unregister",
]

__version__ = "0.1.0"

register()
