"""The choices of a plan, one file a kind."""

from .part import EXACT, MIN_PREFILL_ROWS, Choice, Keys, Operands, Part, Setting, all_keys, all_operands, register
from .precision import Precision
from .rank import Rank
from .window import Window

__all__ = [
    "EXACT", "MIN_PREFILL_ROWS", "Choice", "Keys", "Operands", "Part", "Precision", "Rank", "Setting", "Window",
    "all_keys", "all_operands", "register",
]  # fmt: skip
