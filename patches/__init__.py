"""The only place that knows Transformers' internals: names, masks, families."""

from __future__ import annotations

from .cache import GrowingCache
from .explain import Explanation, explain
from .prepare import PrepareError, prepare, restore, unpad_calls
from .refusal import UnsupportedModel, check
from .registry import NAMES, register, resolve, unregister
from .settings import configure

__all__ = [
    "NAMES",
    "Explanation",
    "GrowingCache",
    "PrepareError",
    "UnsupportedModel",
    "check",
    "configure",
    "explain",
    "prepare",
    "register",
    "resolve",
    "restore",
    "unpad_calls",
    "unregister",
]
