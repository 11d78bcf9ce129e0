"""The only place that knows Transformers' internals: names, masks, families."""

from __future__ import annotations

from .cache import GrowingCache
from .explain import Explanation, explain
from .registry import NAMES, register, resolve, unregister
from .settings import configure

__all__ = ["NAMES", "Explanation", "GrowingCache", "configure", "explain", "register", "resolve", "unregister"]
