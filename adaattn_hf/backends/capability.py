"""What a CUDA device can do, as one record that backends refuse by."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

__all__ = ["Capability", "capability", "of_sm"]


@dataclass(frozen=True)
class Capability:
    """Facts of a device.

    Attributes:
        sm: Compute capability, as `(9, 0)` for Hopper's datacentre devices.
        bf16: Matrix units take bfloat16.
        fp8: Matrix units take fp8.
        copy_engine: An engine copies tiles into shared memory.
        shared_memory: Bytes of it that one program may have.
    """

    sm: tuple[int, int]
    bf16: bool
    fp8: bool
    copy_engine: bool
    shared_memory: int


# CUDA C++ programming guide, table of technical specifications: shared memory per thread block, in KiB.
_SHARED_KIB = {
    (7, 0): 96,
    (7, 2): 96,
    (7, 5): 64,
    (8, 0): 163,
    (8, 6): 99,
    (8, 7): 163,
    (8, 9): 99,
    (9, 0): 227,
    (10, 0): 227,
    (10, 3): 227,
    (11, 0): 227,
    (12, 0): 99,
    (12, 1): 99,
}


def of_sm(sm: tuple[int, int]) -> Capability:
    """The record of a compute capability; one that the table lacks is taken to have the least shared memory, 48 KiB."""
    return Capability(sm, sm >= (8, 0), sm >= (8, 9), sm >= (9, 0), _SHARED_KIB.get(sm, 48) * 1024)


@functools.cache
def _of_device(index: int) -> Capability:
    return of_sm(torch.cuda.get_device_capability(index))


def capability() -> Capability | None:
    """The record of the current CUDA device, None where there is none, or one of another vendor."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return None
    return _of_device(torch.cuda.current_device())
