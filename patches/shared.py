"""Structures without tensors, shared between forward passes of like shape.

They say the same in every pass, and what was found out about them (the backend, the rules of the native kernels) stays
true. Small models would pay microseconds per pass to find it again.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from adaattn_hf.structure import CallStructure

__all__ = ["MOST", "may_share", "recall", "remember"]

MOST = 64
"""Structures that are kept; a decode passes through a new one with every token."""

_known: dict[Hashable, CallStructure] = {}

recall = _known.get


def may_share() -> bool:
    """Whether structures may be kept: a tracer's lengths are symbols, what a dispatch mode sees must not outlive it."""
    return not (torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack())


def remember(key: Hashable, structure: CallStructure) -> None:
    """Keeps a structure under everything that it was made from."""
    if len(_known) >= MOST:
        _known.clear()
    _known[key] = structure
