"""Launches of a Triton kernel that differ in their tensors alone: what stays is put together once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .launcher import Launcher


class Relaunch:
    """A launch whose first arguments change, tensors and descriptors of tiles; grid, variant and the others stay."""

    def __init__(
        self,
        launcher: Launcher,
        grid: tuple[int, ...],
        tables: Sequence[Tensor],
        numbers: Sequence[float],
        constants: Mapping[str, Any],
        kind: Hashable | None,
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
        """
        self._launcher, self._grid, self._tables, self._numbers = launcher, grid, tables, numbers
        self._constants, self._kind = constants, kind
        self._device = tables[0].get_device()
        self._known: tuple[Callable[..., None], tuple[Any, ...]] | None = None

    def __call__(self, tensors: Sequence[Any], addresses: Sequence[Any]) -> None:
        """Launches the kernel on its device's current stream; by its launcher until that knows the variant.

        Args:
            tensors: The first arguments; tensors lie on the device of the tables, and begin where the kind says.
            addresses: The same, of each tensor its address. Triton would ask each tensor for it, and the driver whether
                a device can read there.
        """
        if self._kind is None:
            self._launcher(self._grid, (*tensors, *self._tables, *self._numbers), self._constants, None)
            return
        device = self._device
        if device != torch._C._cuda_getDevice():
            # rarely: asking here costs less than a context manager around every launch
            with torch.cuda.device(device):
                self(tensors, addresses)
            return
        known = self._known
        if known is None:
            found = self._launcher.variant(self._constants, self._kind, device)
            if found is None:
                arguments = *tensors, *self._tables, *self._numbers
                self._launcher(self._grid, arguments, self._constants, self._kind)
                return
            compiled, constants = found
            rest = *(table.data_ptr() for table in self._tables), *self._numbers, *constants
            known = self._known = compiled[(*self._grid, 1, 1)[:3]], rest
        launch, rest = known
        launch(*addresses, *rest, stream=torch._C._cuda_getCurrentRawStream(device))
