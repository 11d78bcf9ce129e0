"""Attention by kernels of our own for CUDA devices, written in Triton."""

from .backend import TritonBackend

__all__ = ["TritonBackend"]
