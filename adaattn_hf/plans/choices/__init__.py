"""The choices of a plan, one file a kind."""

from .base import EXACT, Choice
from .part import KINDS, MIN_PREFILL_ROWS, Colour, Keys, Operands, Part, Setting, all_keys, all_operands, register
from .precision import Precision
from .rank import Rank
from .window import Window

__all__ = [
    "EXACT", "KINDS", "MIN_PREFILL_ROWS", "Choice", "Colour", "Keys", "Operands", "Part", "Precision", "Rank",
    "Setting", "Window", "all_keys", "all_operands", "register",
]  # fmt: skip
