"""What the first layer of a pass found out, for the layers after it.

Where a device is quicker than Python, a layer costs what stands around its kernel. The layers of a pass are handed one
mask object; what was decided for the first of them holds for every other whose call looks the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from adaattn_hf.backends.base import BareCall

__all__ = ["Ready"]


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
