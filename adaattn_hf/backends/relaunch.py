"""Launches of a Triton kernel that differ in their tensors alone: what stays is put together once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .launcher import Launcher
from .straight import Described, Straight, straight_of, watched, with_descriptors


class Relaunch:
    """A launch whose first arguments change, all tensors; grid, variant and the others stay."""

    def __init__(
        self,
        launcher: Launcher,
        grid: tuple[int, ...],
        tables: Sequence[Tensor],
        numbers: Sequence[float],
        constants: Mapping[str, Any],
        kind: Hashable | None,
        described: Described | None = None,
    ) -> None:
        """From what a `Launcher` is called with.

        Args:
            launcher: Of the kernel.
            grid: Programs, in up to three extents.
            tables: The kernel's arguments behind those that change; they are kept, and must not be moved. They lie on
                the device of all launches.
            numbers: Its arguments behind these.
            constants: Its constants by name, and the compiler's options.
            kind: What the compiled variant depends on beside them and the device; None: Triton looks each time.
            described: Which of the first arguments the kernel takes as descriptors of tiles, that differ in the
                addresses of their tensors alone.
        """
        self._launcher, self._grid, self._tables, self._numbers = launcher, grid, tables, numbers
        self._constants, self._kind = constants, kind
        self._device = tables[0].get_device()
        self._described = described or {}
        self._known: tuple[Callable[..., None], tuple[Any, ...], Straight | None] | None = None

    def __call__(self, tensors: Sequence[Tensor], addresses: Sequence[int]) -> None:
        """Launches the kernel on its device's current stream; by its launcher until that knows the variant.

        Args:
            tensors: The first arguments; they lie on the device of the tables, and begin where the kind says.
            addresses: Theirs. Triton would ask each tensor for it, and the driver whether a device can read there.
        """
        if self._kind is None:
            self._look(tensors)
            return
        device = self._device
        if device != torch._C._cuda_getDevice():
            # rarely: asking here costs less than a context manager around every launch
            with torch.cuda.device(device):
                self(tensors, addresses)
            return
        known = self._known
        if known is None:
            known = self._known = self._found(tensors)
        if known is None:
            self._look(tensors)
            return
        launch, rest, straight = known
        stream = torch._C._cuda_getCurrentRawStream(device)
        if straight is None or watched():
            launch(*with_descriptors(self._described, tensors, addresses), *rest, stream=stream)
        else:
            straight(stream, tensors, addresses)

    def _look(self, tensors: Sequence[Tensor]) -> None:
        """Launches by the launcher, for which Triton looks at every argument if it must."""
        first = with_descriptors(self._described, tensors, tensors)
        self._launcher(self._grid, (*first, *self._tables, *self._numbers), self._constants, self._kind)

    def _found(
        self, tensors: Sequence[Tensor]
    ) -> tuple[Callable[..., None], tuple[Any, ...], Straight | None] | None:
        """By Triton's Python, the arguments behind the first ones, and past it; None until the variant is known."""
        found = self._launcher.variant(self._constants, self._kind, self._device)
        if found is None:
            return None
        compiled, constants = found
        grid = (*self._grid, 1, 1)[:3]
        rest = *(table.data_ptr() for table in self._tables), *self._numbers, *constants
        return compiled[grid], rest, straight_of(compiled, grid, tensors, rest, self._described)
