"""Stands for a CUDA device: tensors that say that they lie there, tensors at odd addresses, and kernels of Triton."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from adaattn_hf.backends import capability


class OnCuda(Tensor):
    """A tensor that says that it lies on a CUDA device."""

    is_cuda = True


class OnSecond(Tensor):
    """A tensor that says that it lies on the second CUDA device."""

    def get_device(self) -> int:
        return 1


class Devices:
    """Stands for several CUDA devices, of which one is current; a stream has a hundred times its device's number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, current: int = 0) -> None:
        """Takes the place of what torch says of the current device, and of the block that changes it."""
        self.current, self.entered = current, list[int]()
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: self.current, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 100 * device, raising=False)
        monkeypatch.setattr(torch.cuda, "device", self._made_current)

    @contextmanager
    def _made_current(self, device: int) -> Iterator[None]:
        self.entered.append(device)
        before, self.current = self.current, device
        try:
            yield
        finally:
            self.current = before


def told_of(monkeypatch: pytest.MonkeyPatch, *sms: tuple[int, int], current: int = 0, hip: str | None = None) -> None:
    """`capability` finds CUDA devices of these compute capabilities; torch itself, which may trace, finds none."""
    cuda = SimpleNamespace(
        is_available=lambda: True, current_device=lambda: current, get_device_capability=sms.__getitem__
    )
    seen = SimpleNamespace(cuda=cuda, version=SimpleNamespace(hip=hip), device=torch.device)
    monkeypatch.setattr(capability, "torch", seen)


def shifted(tensor: Tensor) -> Tensor:
    """The same numbers with the same strides, one element behind an aligned address."""
    return tensor.new_empty(tensor.numel() + 1).as_strided(tensor.shape, tensor.stride(), 1).copy_(tensor)


class Kernel:
    """As `triton.jit` makes one: compiles with the first launch, and takes options that are no arguments."""

    def __init__(self, arg_names: tuple[str, ...], compiled: Callable[[list[Any]], Any]) -> None:
        """From its arguments, and what makes a compiled variant of the log that all write to."""
        self.arg_names, self.log, self._compiled = arg_names, list[Any](), compiled

    def __getitem__(self, grid: tuple[int, ...]) -> Any:

        def launch(*arguments: Any, **constants: Any) -> Any:
            self.log.append(("looked", grid, arguments, constants))
            return self._compiled(self.log)

        return launch
