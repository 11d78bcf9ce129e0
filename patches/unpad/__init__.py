"""Runs a whole model without padding: real tokens are packed into one row, and its outputs are padded again."""

from __future__ import annotations

from .hooks import PaddedCallError, Unpadding
from .layout import PackedLayout
from .probe import probe
from .reasons import refusals, trunk_of

__all__ = ["PackedLayout", "PaddedCallError", "Unpadding", "probe", "refusals", "trunk_of"]
