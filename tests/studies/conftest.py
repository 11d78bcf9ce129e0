"""The tiny models and texts of the evaluation's tests serve the studies' too."""

from ..eval.conftest import PAGES, llama

__all__ = ["PAGES", "llama"]
