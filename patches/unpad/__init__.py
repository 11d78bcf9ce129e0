"""The whole model without padding: real tokens in one row, padding put back into what comes out."""

from __future__ import annotations

from .hooks import PaddedCallError, Unpadding
from .layout import PackedLayout
from .probe import probe
from .reasons import refusals, trunk_of

__all__ = ["PackedLayout", "PaddedCallError", "Unpadding", "probe", "refusals", "trunk_of"]
