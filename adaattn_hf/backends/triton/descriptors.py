"""TMA descriptors of tiles of keys and values, for Hopper and later devices."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..base import installed
from ..capability import capability
from . import hopper
from .launcher import aligned
from .sizes import padded


@functools.cache
def _descriptors() -> Any:
    """Triton's tensor descriptors, None in versions that have none."""
    if not installed("triton.tools.tensor_descriptor"):
        return None
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor


@functools.cache
def _has_tma(device: torch.device) -> bool:
    """Whether the device copies whole tiles (Hopper and later); where kernels are interpreted it stands for one."""
    facts = capability(device) if device.type == "cuda" else None
    return device.type != "cuda" or (facts is not None and facts.tiles)


def descriptor_of(tensor: Tensor, rows: int, columns: int | None = None, layout: Any = None) -> Any:
    """A descriptor of tiles `[1, 1, rows, columns]` of a tensor, None where TMA cannot take them.

    Args:
        tensor: `[batch, heads, length, width]`.
        rows: Of a tile.
        columns: Of a tile; all of them when absent.
        layout: How a tile lies in shared memory, for kernels in Gluon.
    """
    width, size, strides = tensor.shape[3], tensor.element_size(), tensor.stride()
    if size != 2 or width != padded(width) or width < 32 or not aligned(tensor):
        return None
    if _descriptors() is None or not _has_tma(tensor.device):
        return None
    if strides[3] != 1 or any(s * size % 16 or not s for s in strides[:3]):
        return None
    tile = [1, 1, rows, columns or width]
    if layout is None:
        return _descriptors()(tensor, list(tensor.shape), list(strides), tile)
    return hopper.descriptors()(tensor, list(tensor.shape), list(strides), tile, layout)
