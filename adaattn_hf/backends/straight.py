"""Calls Triton's launcher in C with what Triton's layers of Python would pass it, read off them once.

At every launch these layers look for hooks and encode each descriptor of tiles anew. What is encoded depends on a
tensor's address alone, where its shape and strides stay: it is kept by address, for all launches of such tensors.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

import triton
from torch import Tensor

from .remembered import Remembered


class Form(Protocol):
    """What descriptors of tensors say that differ in their addresses alone."""

    @property
    def encoded(self) -> dict[Hashable, dict[int, Any]]:
        """By what a kernel says of its descriptors, and by address: descriptors as the driver encodes them."""

    def of(self, tensor: Tensor) -> Any:
        """The descriptor of one of them."""


Described = Mapping[int, Form]
"""By the places of arguments that are descriptors of tiles: what these say."""
_MOST = 2048
"""Most encoded descriptors that are kept of a form."""
_known = Remembered(256)
"""By identity of a compiled kernel and of what descriptors of its tensors say: both, and what the kernel is passed."""
_PLACES = "self", "gridX", "gridY", "gridZ", "stream", "function"
_HOOKS = "kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook"
_TAKEN = (*_PLACES, "args"), (*_PLACES, *_HOOKS, "args")
"""What the launcher of a compiled kernel takes in Triton 3.6, and from 3.7 to 3.9; both are passed the same."""


def watched() -> bool:
    """Whether somebody asked Triton to be called at launches, as its profiler does."""
    asked = triton.knobs.runtime
    enter, leave = asked.launch_enter_hook, asked.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))  # chains of hooks, or one


def launcher_in_c(compiled: Any, descriptors: int) -> Any:
    """What a compiled kernel's launcher calls in the end, None where that is not made as in Triton 3.6 to 3.9.

    None, too, for kernels that need memory of their own at every launch.

    Args:
        compiled: As Triton compiles a kernel.
        descriptors: How many of its arguments must be descriptors, each of them encoded as one map.
    """
    run = compiled.run
    facts, driver = vars(run), sys.modules[type(run).__module__]
    sizes = facts.get("global_scratch_size"), facts.get("profile_scratch_size")
    taken = tuple(inspect.signature(type(run).__call__).parameters)
    if taken not in _TAKEN or sizes != (0, 0) or facts.get("gsan_enabled"):
        return None
    meta = getattr(compiled.metadata, "tensordesc_meta", (None,))
    if len(meta) != descriptors or None in meta or not hasattr(driver, "wrap_handle_tensordesc"):
        return None
    launch = facts.get("launch")
    if inspect.isfunction(launch):  # it encodes the descriptors, and calls what it holds by this name
        launch = inspect.getclosurevars(launch).nonlocals.get("launcher")
    return None if inspect.isfunction(launch) else launch


def with_descriptors(described: Described, tensors: Sequence[Tensor], others: Sequence[Any]) -> list[Any]:
    """Arguments: descriptors of the tensors that are described, in the place of the others what is given there."""
    return [described[i].of(tensors[i]) if i in described else one for i, one in enumerate(others)]


class _Mark(int):
    """A number that is found again among what a launcher in C is passed, whatever is computed with it before."""


class Passed:
    """What the launcher in C of a compiled kernel is passed, read off one launch, for tensors described alike."""

    def __init__(
        self, compiled: Any, launch: Any, tensors: Sequence[Tensor], others: int, described: Described
    ) -> None:
        """From one of the launches, no tensor of which is kept.

        Args:
            compiled: The kernel; its code is unloaded with it.
            launch: Its `launcher_in_c`.
            tensors: The first arguments.
            others: How many it takes behind them.
            described: Which of the tensors are passed as descriptors.
        """
        self.compiled, self.launch, self.described = compiled, launch, described
        stream, grid, seen = object(), [_Mark(1) for _ in range(3)], list[Any]()
        marks, self._rest = [object() for _ in tensors], [object() for _ in range(others)]
        shown = copy.copy(compiled.run)
        shown.launch = lambda *passed: seen.extend(passed)
        told = compiled.function, compiled.packed_metadata, None, None, None
        shown(*grid, stream, *told, *marks, *self._rest)
        self.together = isinstance(seen[-1], tuple)  # from 3.7 on the kernel's arguments are passed as one
        self.base = seen[:-1] if self.together else seen[: -len(marks) - others]
        self.stream, *self.grid = (_place(one, self.base) for one in (stream, *grid))
        driver, kinds = sys.modules[type(compiled.run).__module__], dict(compiled.src.signature)
        meta = compiled.metadata.tensordesc_meta
        self._encode = driver.wrap_handle_tensordesc(lambda *passed: passed, kinds, meta)
        self.kernel = self.encoded(tensors, marks)
        maps = [place for place, one in enumerate(self.kernel) if isinstance(one, driver.PyCUtensorMap)]
        self.maps = [
            (i, at, described[i].encoded.setdefault(repr(said), {}))
            for i, at, said in zip(sorted(described), maps, meta, strict=True)
        ]
        self.tensors = [(i, _place(mark, self.kernel)) for i, mark in enumerate(marks) if i not in described]
        self.others = [_place(one, self.kernel) for one in self._rest]

    def encoded(self, tensors: Sequence[Tensor], addresses: Sequence[Any]) -> list[Any]:
        """The kernel's arguments as they are passed in C, marks in the place of those behind the tensors."""
        kernel = with_descriptors(self.described, tensors, addresses) + self._rest
        passed = self._encode(*self.base, *((tuple(kernel),) if self.together else kernel))
        return list(passed[-1] if self.together else passed[len(self.base) :])


def _place(mark: Any, among: Sequence[Any]) -> int:
    """Where a mark is."""
    return next(place for place, one in enumerate(among) if one is mark)


class Straight:
    """Launches of one compiled kernel that differ in the tensors of their first arguments."""

    def __init__(self, passed: Passed, grid: tuple[int, ...], rest: Sequence[Any]) -> None:
        """Of a kernel.

        Args:
            passed: Of `passed_of`.
            grid: Programs, in three extents.
            rest: The arguments behind the tensors, with the constants.
        """
        self._passed, self._kernel, base = passed, passed.kernel.copy(), passed.base.copy()
        for place, one in zip(passed.others, rest, strict=True):
            self._kernel[place] = one
        for place, extent in zip(passed.grid, grid, strict=True):
            base[place] = extent
        self._before, self._between = base[: passed.stream], base[passed.stream + 1 :]

    def __call__(self, stream: int, tensors: Sequence[Tensor], addresses: Sequence[int]) -> None:
        """Launches on a stream of the current device, which holds the tensors at these addresses."""
        passed, kernel, new = self._passed, self._kernel.copy(), None
        for i, place in passed.tensors:
            kernel[place] = addresses[i]
        for i, place, kept in passed.maps:
            one = kept.get(addresses[i])
            if one is None:
                new = new or passed.encoded(tensors, addresses)
                if len(kept) >= _MOST:
                    kept.clear()
                one = kept[addresses[i]] = new[place]
            kernel[place] = one
        passed.launch(*self._before, stream, *self._between, *((kernel,) if passed.together else kernel))


def passed_of(compiled: Any, tensors: Sequence[Tensor], others: int, described: Described) -> Passed | None:
    """What a compiled kernel's launcher in C is passed, from one of its launches; None without a `launcher_in_c`.

    It is read off once for all launches that are described alike, and no tensor of them is kept.

    Args:
        compiled: The kernel; its code is unloaded with it.
        tensors: The first arguments.
        others: How many come behind them, with the constants.
        described: Which of the tensors are passed as descriptors.
    """

    def read() -> tuple[Any, Described, Passed | None]:
        launch = launcher_in_c(compiled, len(described))
        passed = None if launch is None else Passed(compiled, launch, tensors, others, described)
        return compiled, described, passed  # the first two are kept, so that nothing else has their identity

    key = id(compiled), others, *(item for i, form in described.items() for item in (i, id(form)))
    return _known.get(key, read)[2]
