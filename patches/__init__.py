"""The only place that knows Transformers' internals: names, masks, families."""

from __future__ import annotations

from .registry import NAMES, register, unregister

__all__ = ["NAMES", "register", "unregister"]
