"""Launches of a Triton kernel that differ in their tensors alone: what stays is put together once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .launcher import Launcher
from .straight import Described, Passed, Straight, passed_of, watched, with_descriptors


class Variant:
    """What launches share that differ in their first arguments, grid and tables, such as those of a plan's layers."""

    def __init__(
        self,
        launcher: Launcher,
        numbers: Sequence[float],
        constants: Mapping[str, Any],
        kind: Hashable | None,
        described: Described | None = None,
    ) -> None:
        """From what a `Launcher` is called with.

        Args:
            launcher: Of the kernel.
            numbers: Its arguments behind those that change and the tables.
            constants: Its constants by name, and the compiler's options.
            kind: What the compiled variant depends on beside them and the device; None: Triton looks each time.
            described: Which of the first arguments the kernel takes as descriptors of tiles, that differ in the
                addresses of their tensors alone.
        """
        self.launcher, self.numbers, self.constants, self.kind = launcher, numbers, constants, kind
        self.described = described or {}
        self._known: dict[int, tuple[Any, tuple[Any, ...], Passed | None]] = {}

    def compiled(
        self, device: int, tensors: Sequence[Tensor], others: int
    ) -> tuple[Any, tuple[Any, ...], Passed | None] | None:
        """The compiled kernel, its constants and what its launcher in C is passed; None until the launcher knows it.

        Args:
            device: Index of the device.
            tensors: The first arguments of a launch.
            others: How many arguments come behind them, without constants.
        """
        found = self._known.get(device)
        if found is None:
            known = self.launcher.variant(self.constants, self.kind, device)
            if known is None:
                return None
            kernel, constants = known
            passed = passed_of(kernel, tensors, others + len(constants), self.described)
            found = self._known[device] = kernel, constants, passed
        return found


class Relaunch:
    """A launch whose first arguments change, all tensors; grid, variant and the others stay."""

    def __init__(
        self, variant: Variant, grid: tuple[int, ...], tables: Sequence[Tensor], last: tuple[int, ...] = ()
    ) -> None:
        """Of a variant.

        Args:
            variant: Of the kernel.
            grid: Programs, in up to three extents.
            tables: The kernel's arguments behind those that change; they are kept, and must not be moved. They lie on
                the device of all launches, where the variant says.
            last: Its arguments behind the variant's numbers.
        """
        self._variant, self._grid, self._tables, self._last = variant, grid, tables, last
        self._device = tables[0].get_device()
        self._known: tuple[Callable[..., None], tuple[Any, ...], Straight | None] | None = None

    def __call__(self, tensors: Sequence[Tensor], addresses: Sequence[int]) -> None:
        """Launches the kernel on its device's current stream; by its launcher until that knows the variant.

        Args:
            tensors: The first arguments; they lie on the device of the tables, and begin where the kind says.
            addresses: Theirs. Triton would ask each tensor for it, and the driver whether a device can read there.
        """
        variant = self._variant
        if variant.kind is None:
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
            launch(*with_descriptors(variant.described, tensors, addresses), *rest, stream=stream)
        else:
            straight(stream, tensors, addresses)

    def _look(self, tensors: Sequence[Tensor]) -> None:
        """Launches by the launcher, for which Triton looks at every argument if it must."""
        variant = self._variant
        arguments = with_descriptors(variant.described, tensors, tensors)
        arguments += *self._tables, *variant.numbers, *self._last
        variant.launcher(self._grid, arguments, variant.constants, variant.kind)

    def _found(
        self, tensors: Sequence[Tensor]
    ) -> tuple[Callable[..., None], tuple[Any, ...], Straight | None] | None:
        """By Triton's Python, the arguments behind the first ones, and past it; None until the variant is known."""
        variant = self._variant
        others = len(self._tables) + len(variant.numbers) + len(self._last)
        found = variant.compiled(self._device, tensors, others)
        if found is None:
            return None
        kernel, constants, passed = found
        grid = (*self._grid, 1, 1)[:3]
        rest = *(table.data_ptr() for table in self._tables), *variant.numbers, *self._last, *constants
        if passed is None:
            return kernel[grid], rest, None
        return lambda *asked, stream: kernel[grid](*asked, stream=stream), rest, Straight(passed, grid, rest)
