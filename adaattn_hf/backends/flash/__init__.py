"""Attention through the flash-attn packages: 2 and 3, which are built, and 4, which compiles as it is called."""

from __future__ import annotations

from .fa4 import Flash4Backend
from .variants import FA2, FA3, FA3_FWD, FlashBackend, FlashVariant

__all__ = ["FA2", "FA3", "FA3_FWD", "Flash4Backend", "FlashBackend", "FlashVariant"]
