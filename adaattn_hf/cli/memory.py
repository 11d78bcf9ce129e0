"""Turns an out-of-memory error into a sentence that says what was being done and what would fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..errors import OutOfMemory

CPU_ALLOCATOR = "DefaultCPUAllocator"
FULL = (CPU_ALLOCATOR, "out of memory", "STATUS_ALLOC_FAILED")
"""Words in the plain `RuntimeError` that torch raises where the machine, or a library of CUDA's, has no memory left."""


@contextmanager
def room_or_sentence(sentence: Callable[[str], str]) -> Iterator[None]:
    """Context manager: replaces an out-of-memory error of the allocator by OutOfMemory with the given sentence."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and not any(words in str(error) for words in FULL):
            raise
        raise OutOfMemory(sentence(_said(error))) from error


def _said(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    text = text[text.find(CPU_ALLOCATOR) :] if CPU_ALLOCATOR in text else text
    for advice in (" Including non-PyTorch", " Of the allocated memory", " If reserved", " Error code"):
        text = text.partition(advice)[0]
    return text.rstrip(". ")
