"""Faster attention for Transformers models by one string: `attn_implementation="adaattn"`.

Importing the package registers the names and does nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from .patches.callback import AdaAttnCallback

__all__ = [
    "NAMES",
    "AdaAttnCallback",
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


def __getattr__(name: str) -> Any:
    """The callback, imported when it is asked for: it loads the Trainer's modules."""
    if name == "AdaAttnCallback":
        from .patches.callback import AdaAttnCallback

        return AdaAttnCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


register()
