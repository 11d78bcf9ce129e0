"""Descriptors of tiles, by which the copy engine of Hopper and later devices brings keys and values."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base import installed
from ..capability import capability
from ..launcher import aligned
from . import hopper
from .sizes import padded


@functools.cache
def _descriptors() -> Any:
    """Triton's tensor descriptors, None in versions that have none."""
    if not installed("triton.tools.tensor_descriptor"):
        return None
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor


@functools.cache
def _copies_tiles(device: torch.device) -> bool:
    """Whether the device has an engine that copies tiles (Hopper and later)."""
    facts = capability(device) if device.type == "cuda" else None
    return device.type != "cuda" or (facts is not None and facts.tiles)


class BulkForm(NamedTuple):
    """What descriptors of all tensors of a shape, strides and dtype share: their class, and all but the tensor.

    Beside that, by address, those that were encoded for a launch.
    """

    kind: type
    facts: dict[str, Any]
    encoded: dict[Hashable, dict[int, Any]]

    def of(self, tensor: Tensor) -> Any:
        """The descriptor of one of them, which begins at a multiple of 16 bytes: Triton's checks are slow."""
        made: Any = object.__new__(self.kind)
        made.__dict__.update(self.facts, base=tensor)
        return made


def bulk_of(tensor: Tensor, rows: int, columns: int | None = None, layout: Any = None) -> Any:
    """A descriptor of tiles `[1, 1, rows, columns]` of a tensor, None where the copy engine cannot take them.

    Args:
        tensor: `[batch, heads, length, width]`.
        rows: Of a tile.
        columns: Of a tile; all of them when absent.
        layout: How a tile lies in shared memory, for kernels in Gluon.
    """
    form = bulk_form(tensor, rows, columns, layout)
    return form.of(tensor) if form is not None and aligned(tensor) else None


def bulk_form(tensor: Tensor, rows: int, columns: int | None = None, layout: Any = None) -> BulkForm | None:
    """What a descriptor says of all tensors of a shape, strides and dtype; None where the engine cannot take them."""
    width, size, strides = tensor.shape[3], tensor.element_size(), tensor.stride()
    if size != 2 or width != padded(width) or width < 32:
        return None
    if _descriptors() is None or not _copies_tiles(tensor.device):
        return None
    if strides[3] != 1 or any(s * size % 16 or not s for s in strides[:3]):
        return None
    return _form(tensor.dtype, tensor.shape, strides, (1, 1, rows, columns or width), layout)


@functools.lru_cache(maxsize=256)
def _form(
    dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...], layout: Any
) -> BulkForm:
    """The same, checked by Triton once; layers of a model and passes of a length share it."""
    # of a tensor of no bytes that begins at 0: the checks of Triton ask for addresses that are multiples of 16
    place = torch.empty(0, dtype=dtype, device="cpu")
    kind = _descriptors() if layout is None else hopper.descriptors()
    made = kind(place, list(shape), list(strides), list(block), *(() if layout is None else (layout,)))
    return BulkForm(kind, {name: value for name, value in vars(made).items() if name != "base"}, {})
