"""Compiled kernels of Triton whose launchers in C note what they are passed; in the place of its driver."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from adaattn_hf.backends import straight


@dataclass
class PyCUtensorMap:
    """A descriptor as it is encoded."""

    address: int


def encode(address: int) -> PyCUtensorMap:
    """Encodes the descriptor of a tensor at an address."""
    return PyCUtensorMap(address)


def note_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of descriptors of launches that what is passed in C is read off, as they are read."""
    read: list[int] = []
    launcher_in_c = straight.launcher_in_c

    def noted(compiled: Any, descriptors: int) -> Any:
        read.append(descriptors)
        return launcher_in_c(compiled, descriptors)

    monkeypatch.setattr(straight, "launcher_in_c", noted)
    return read


class Described:
    """A descriptor of tiles of a tensor, as far as it is encoded."""

    padding, round_f32_to_tf32 = "zero", False

    def __init__(self, tensor: Tensor) -> None:
        """Of a tensor of two extents."""
        self.base, self.shape, self.strides = tensor, list(tensor.shape), list(tensor.stride())


class Form:
    """What descriptors of tensors of one shape say."""

    def __init__(self) -> None:
        """With nothing encoded."""
        self.encoded: dict[Hashable, dict[int, Any]] = {}

    def of(self, tensor: Tensor) -> Described:
        """The descriptor of a tensor."""
        return Described(tensor)


class Noting:
    """In the place of a launcher in C."""

    def __init__(self, log: list[Any]) -> None:
        """From what it writes to."""
        self.log = log

    def __call__(self, *passed: Any) -> None:
        """Notes what it is passed."""
        self.log.append(passed)


def wrap_handle_tensordesc(launcher: Any, signature: dict[str, str], tensordesc_meta: Sequence[Any]) -> Any:
    """As Triton's, for both kinds of launchers below."""
    if not tensordesc_meta:
        return launcher

    def expanded(arguments: Sequence[Any]) -> list[Any]:
        found: list[Any] = []
        for one, kind in zip(arguments, signature.values(), strict=True):
            if kind == "tensordesc":
                found += [encode(one.base.data_ptr()), *one.shape, *one.strides]
            else:
                found.append(one)
        return found

    def inner(*passed: Any) -> Any:
        if isinstance(passed[-1], tuple):
            return launcher(*passed[:-1], expanded(passed[-1]))
        count = len(signature)
        return launcher(*passed[:-count], *expanded(passed[-count:]))

    return inner


class Flat:
    """As compiled kernels are launched in Triton 3.6."""

    launch: Any

    def __call__(self, gridX: int, gridY: int, gridZ: int, stream: int, function: int, *args: Any) -> None:
        """Launches."""
        self.launch(gridX, gridY, gridZ, stream, function, None, None, *args)


class Together(Flat):
    """The same from 3.7 on."""

    def __call__(
        self, gridX: int, gridY: int, gridZ: int, stream: int, function: int, kernel_metadata: Any,
        launch_metadata: Any, launch_enter_hook: Any, launch_exit_hook: Any, *args: Any,
    ) -> None:  # fmt: skip
        """Launches."""
        hooks = launch_metadata, launch_enter_hook, launch_exit_hook
        self.launch(gridX, gridY, gridZ, stream, function, kernel_metadata, *hooks, None, None, args)


class Other(Flat):
    """One that was not looked at."""

    def __call__(self, grid: Any, stream: int, function: int, *args: Any) -> None:  # type: ignore[override]
        """Launches."""
        raise AssertionError


class Compiled:
    """As Triton compiles a kernel."""

    function, packed_metadata = 5, (4, 1, 0)

    def __init__(
        self,
        log: list[Any],
        run: Any,
        signature: dict[str, str],
        wrap: Callable[..., Any] = wrap_handle_tensordesc,
    ) -> None:
        """From what its launcher in C writes to, its own, its arguments' kinds, and how Triton wraps the one in C."""
        meta = [{"swizzle": 3, "elem_size": 2, "elem_type": 6, "block_size": [1, 1], "fp4_padded": False}]
        meta = meta * list(signature.values()).count("tensordesc")
        self.run, self.src = run, SimpleNamespace(signature=signature)
        self.metadata = SimpleNamespace(tensordesc_meta=meta)
        run.launch = wrap(Noting(log), signature, meta)
        run.global_scratch_size = run.profile_scratch_size = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        """As Triton launches it."""

        def runner(*arguments: Any, stream: int) -> None:
            told = self.packed_metadata, "told", "enter", "leave"
            self.run(*grid, stream, self.function, *told, *arguments)

        return runner
