"""Attention for Transformers by name: exact, or what the plan in `config.adaattn` says, without any import."""

from .forward import flash_attn_forward

__all__ = ["flash_attn_forward", "supports_flash_attn"]

supports_flash_attn = True
"""By this and by the function's name Transformers takes the function for its attention interface."""
