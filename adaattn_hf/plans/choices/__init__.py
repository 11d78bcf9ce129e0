"""The choices of a plan, one file a kind."""

from .part import EXACT, KINDS, MIN_PREFILL_ROWS, Choice, Colour, Keys, Part, Setting, all_keys, all_operands, register
from .precision import Precision
from .rank import Rank
from .window import Window

__all__ = [
    "EXACT", "KINDS", "MIN_PREFILL_ROWS", "Choice", "Colour", "Keys", "Part", "Precision", "Rank", "Setting", "Window",
    "all_keys", "all_operands", "register",
]  # fmt: skip
