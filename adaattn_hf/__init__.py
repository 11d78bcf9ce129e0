"""Faster attention for Transformers models by one string: `attn_implementation="adaattn"`.

Importing the package registers the names and does nothing else.
"""

from __future__ import annotations

from .patches import register, unregister

__all__ = ["__version__", "register", "unregister"]

__version__ = "0.1.0"

register()
