"""Backends that call flash-attn: versions 2 and 3, compiled when installed, and 4, compiled at the first call."""

from __future__ import annotations

from .variants import FA2, FA3, FA3_FWD, Flash4Backend, FlashBackend

__all__ = ["FA2", "FA3", "FA3_FWD", "Flash4Backend", "FlashBackend"]
