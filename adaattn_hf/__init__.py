"""Faster attention for Transformers models by one string: `attn_implementation="adaattn"`.

Importing the package registers the names and does nothing else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .attach import load_plan, plan_of, remove_plan
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
from .plan import Plan, PlanError
from .presets import load_preset, preset_names

if TYPE_CHECKING:
    from .observe import monitoring, statistics
    from .patches.callback import AdaAttnCallback

__all__ = [
    "NAMES",
    "AdaAttnCallback",
    "AdaAttnConfig",
    "ConfigError",
    "Explanation",
    "GrowingCache",
    "Plan",
    "PlanError",
    "PrepareError",
    "UnsupportedModel",
    "__version__",
    "check",
    "configure",
    "explain",
    "load_plan",
    "load_preset",
    "monitoring",
    "plan_of",
    "prepare",
    "preset_names",
    "register",
    "remove_plan",
    "resolve",
    "restore",
    "statistics",
    "unpad_calls",
    "unregister",
]

__version__ = "0.1.0"


_LATE = {
    "AdaAttnCallback": "adaattn_hf.patches.callback",  # loads the Trainer's modules
    "monitoring": "adaattn_hf.observe",
    "statistics": "adaattn_hf.observe",
}


def __getattr__(name: str) -> Any:
    """What is imported when it is asked for."""
    if name in _LATE:
        return getattr(import_module(_LATE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


register()
