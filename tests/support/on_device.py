"""Stands for a CUDA device: tensors that say that they lie there, tensors at odd addresses, and kernels of Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


class OnCuda(Tensor):
    """A tensor that says that it lies on a CUDA device."""

    is_cuda = True


def shifted(tensor: Tensor) -> Tensor:
    """The same numbers with the same strides, one element behind an aligned address."""
    return tensor.new_empty(tensor.numel() + 1).as_strided(tensor.shape, tensor.stride(), 1).copy_(tensor)


class Kernel:
    """As `triton.jit` makes one: compiles with the first launch, and takes options that are no arguments."""

    def __init__(self, arg_names: tuple[str, ...], compiled: Callable[[list[Any]], Any]) -> None:
        """From its arguments, and what makes a compiled variant of the log that all write to."""
        self.arg_names, self.log, self._compiled = arg_names, list[Any](), compiled

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        """Notes that Triton looked at a launch."""

        def launch(*arguments: Any, **constants: Any) -> Any:
            self.log.append(("looked", grid, arguments, constants))
            return self._compiled(self.log)

        return launch
