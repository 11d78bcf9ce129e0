"""The only place that knows Transformers' internals: names, masks, families."""

from __future__ import annotations

from .explain import Explanation, explain
from .registry import NAMES, register, resolve, unregister
from .settings import configure

__all__ = ["NAMES", "Explanation", "configure", "explain", "register", "resolve", "unregister"]
