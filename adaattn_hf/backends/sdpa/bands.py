"""Structures that are not made of runs: bands of query rows, each with its own mask."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ...attention.structure import CallStructure
from . import limits
from .parts import Part, Program, empty_rows

__all__ = ["constant", "dense_part", "dense_program"]


def dense_program(
    structure: CallStructure, device: torch.device, dtype: torch.dtype, step: int, lse: bool = True
) -> Program:
    """Bands of `step` rows against the keys that any of their queries sees.

    Without `lse` it is not told which rows a small mask leaves empty.
    """
    heads = 1 if structure.mask is None else structure.mask.shape[1]
    pairs = structure.batch * heads * structure.q_len * structure.kv_len
    keep = pairs * dtype.itemsize <= limits.KEPT_BYTES
    if pairs <= limits.SMALL_PAIRS and step >= structure.q_len:
        # looking for what to leave out would cost more than computing it
        whole = Part(0, structure.batch, 0, structure.q_len, 0, structure.kv_len)
        mask = torch.where(
            structure.visible(device=device),
            constant(0.0, dtype, device),
            constant(float("-inf"), dtype, device),
        )
        return Program(
            (whole._replace(mask=mask, empty=empty_rows(mask) if lse else None),), True, merges=False
        )
    parts = []
    covered = True
    for start in range(0, structure.q_len, step):
        stop = min(start + step, structure.q_len)
        visible = structure.visible(start, stop, device=device)
        seen = visible.flatten(0, 2).any(dim=0).nonzero()
        if len(seen) == 0:
            covered = False
            continue
        low, high = int(seen[0]), int(seen[-1]) + 1
        part = Part(0, structure.batch, start, stop - start, low, high - low)
        parts.append(_with_mask(part, visible, dtype) if keep else part)
    return Program(tuple(parts), covered, merges=False, dense=not keep)


@functools.cache
def constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number as a tensor that is made once."""
    return torch.full((), value, dtype=dtype, device=device)


def dense_part(part: Part, structure: CallStructure, device: torch.device, dtype: torch.dtype) -> Part:
    """A part with its mask, made now."""
    return _with_mask(part, structure.visible(part.q_start, part.q_start + part.q_len, device=device), dtype)


def _with_mask(part: Part, visible: Tensor, dtype: torch.dtype) -> Part:
    shown = visible[..., part.k_start : part.k_start + part.k_len]
    if bool(shown.all()):
        return part
    mask = torch.zeros(shown.shape, dtype=dtype, device=shown.device).masked_fill_(~shown, float("-inf"))
    empty = empty_rows(mask)
    return part._replace(mask=mask, empty=empty if bool(empty.any()) else None)
