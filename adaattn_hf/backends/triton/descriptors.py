"""TMA descriptors of tiles of keys and values, for Hopper and later devices."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..base import installed
from ..capability import capability
from .launcher import aligned
from .sizes import padded


@functools.cache
def _has_tma(device: torch.device) -> bool:
    """Whether this Triton has descriptors, and the device copies whole tiles; an interpreted kernel stands for one."""
    facts = capability(device) if device.type == "cuda" else None
    tiles = device.type != "cuda" or (facts is not None and facts.tiles)
    return tiles and bool(installed("triton.tools.tensor_descriptor"))


@functools.cache
def _layout() -> Any:
    """How TMA lays a tile `[1, 1, keys, channels]` of 16 bits down in shared memory, for kernels in Gluon."""
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)


def descriptor_of(tensor: Tensor, rows: int, columns: int | None = None, gluon: bool = False) -> Any:
    """A descriptor of tiles `[1, 1, rows, columns]` of a tensor with four dimensions, None where TMA cannot take them.

    Tiles have all columns when none are given. `gluon`: a kernel in Gluon reads it.
    """
    width, size, strides = tensor.shape[3], tensor.element_size(), tensor.stride()
    if size != 2 or width != padded(width) or width < 32 or not aligned(tensor) or not _has_tma(tensor.device):
        return None
    if strides[3] != 1 or any(s * size % 16 or not s for s in strides[:3]):
        return None
    place = tensor, list(tensor.shape), list(strides), [1, 1, rows, columns or width]
    if gluon:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as OfGluon

        return OfGluon(*place, _layout())
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(*place)
