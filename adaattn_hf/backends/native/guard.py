"""Checks in front of the C interface: tensors whose memory can be read, and rules that cover the call.

The kernels read raw memory, so nothing may reach them unchecked. That queries, keys and values belong together an
`AttentionCall` has seen to. A call asks a few cheap questions more (`lies`); only where one is answered with no does
it come here, to be put right or refused in words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ...attention.tracing import holds_no_memory

Form = Literal["contiguous", "rows", "strided", "broadcast"]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
OFFSETS = 1 << 40
"""An address up to which it may be but the offset of a view into a storage that was freed: that one begins at 0."""


def lies(tensor: Tensor) -> bool:
    """Whether the numbers of a real tensor lie where it says, asked cheaply; False asks for a closer look."""
    try:
        return type(tensor) is Tensor and tensor.is_cpu and tensor.data_ptr() > OFFSETS and not tensor.is_neg()
    except (RuntimeError, NotImplementedError):
        return False  # sparse tensors and the like have no storage to ask for


def readable(tensor: Tensor, name: str) -> Tensor:
    """The tensor with its numbers in memory: lazily negated, conjugated and all-zero tensors are written out.

    A ValueError for another device or layout, storage that was freed, or a subclass that only traces, wraps or shards.
    """
    if lies(tensor):
        return tensor
    if holds_no_memory(tensor) or tensor.layout != torch.strided or not tensor.is_cpu:
        raise ValueError(
            f"{name}: got a {type(tensor).__name__} on {tensor.device} with layout {tensor.layout}, expected a plain "
            'dense CPU tensor, whose memory the native kernels read; use attn_implementation="adaattn_sdpa"'
        )
    if tensor._is_zerotensor():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.numel() and not tensor.untyped_storage().data_ptr():
        raise ValueError(
            f"{name}: got shape {tuple(tensor.shape)} without memory: its storage was freed; gather the tensor before "
            "attention reads it"
        )
    return tensor


def check_rule(name: str, tensor: Tensor, extents: Sequence[int], dtype: torch.dtype | None, form: Form) -> None:
    """Refuse a tensor of the rules that does not cover the call; the ValueError says what it has and should have.

    An extent of -1 stands for how many segments there are, which the kernels check themselves; a `dtype` of None for
    any floating-point one of theirs. A `form` is `contiguous`, `rows` (each of which is), `strided` (any strides), or
    `broadcast`: any strides, and 1 may stand for an extent.
    """
    shape = tuple(tensor.shape)
    fits = shape == tuple(extents) or (
        len(shape) == len(extents)
        and all(
            extent in (size, -1) or (form == "broadcast" and size == 1)
            for size, extent in zip(shape, extents, strict=True)
        )
    )
    if form == "contiguous":
        fits = fits and tensor.is_contiguous()
    elif form == "rows":
        fits = fits and tensor.stride(-1) == 1
    if not fits:
        expected = tuple("n" if extent < 0 else extent for extent in extents)
        raise ValueError(f"{name}: got shape {shape} with strides {tensor.stride()}, expected {expected}, {form}")
    if not lies(tensor) and readable(tensor, name) is not tensor:
        raise ValueError(f"{name}: got a lazily negated or zero tensor, expected numbers in memory")
    if tensor.dtype not in (FLOATS if dtype is None else (dtype,)):
        raise ValueError(f"{name}: got {tensor.dtype}, expected {dtype or 'float32, bfloat16 or float16'}")
