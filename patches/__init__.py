"""The only place that knows Transformers' internals: names, masks, families."""

from __future__ import annotations

from .cache import GrowingCache
from .explain import Explanation, explain
from .refusal import UnsupportedModel, check
from .registry import NAMES, register, resolve, unregister
from .settings import configure

__all__ = [
    "NAMES",
    "Explanation",
    "GrowingCache",
    "UnsupportedModel",
    "check",
    "configure",
    "explain",
    "register",
    "resolve",
    "unregister",
]
