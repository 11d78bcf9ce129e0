"""Storage for keys and values that grows in place.

Tensors only; Transformers' cache classes are in `patches`.
"""

from __future__ import annotations

from .growing import GrowingTensor

__all__ = ["GrowingTensor"]
