"""The fast path of small calls: what one layer, or one forward pass, worked out is kept for those that look alike.

Where the device is quicker than Python, a layer costs what stands around its kernel. Two things are kept. `Ready` holds
the routing decision of a pass's first layer, for the layers after it: all are handed the same mask object. Structures
without tensors are kept between passes of like shape, and with each what was derived from it (the backend, the rules of
the native kernels).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adaattn_hf.attention.structure import CallStructure
from adaattn_hf.backends.base import BareCall

__all__ = ["MOST", "Ready", "flows", "may_share", "recall", "remember"]

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


class Ready(NamedTuple):
    """The shortest way of a layer, and the facts under which it was taken.

    Attributes:
        backend: The one that was asked for by name, if any.
        config: The configuration of the module that was asked; its settings say nothing.
        device, dtype: Of query, key and value.
        shapes: Of query, key and value.
        gradient: Whether a gradient flows.
        attend: The way.
    """

    backend: str | None
    config: Any
    device: torch.device
    dtype: torch.dtype
    shapes: tuple[torch.Size, torch.Size, torch.Size]
    gradient: bool
    attend: BareCall

    def fits(self, backend: str | None, config: Any, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Whether another layer's call looks the same. Autocast and listeners are the caller's to ask for."""
        dtype = self.dtype
        return (
            config is self.config
            and backend is self.backend
            and query.dtype is dtype
            and key.dtype is dtype
            and value.dtype is dtype
            and (query.shape, key.shape, value.shape) == self.shapes
            and query.device == self.device
            and self.gradient is flows(query, key, value)
        )


def flows(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether a gradient flows into one of them."""
    return torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
