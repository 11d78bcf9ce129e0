"""What an arm costs: time, measured in turns with the other arms, and peak memory."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")


@dataclass(frozen=True)
class Elapsed:
    """Seconds of one call: by the clock, and of the processor (all threads of this process)."""

    wall: float
    process: float


def timed(call: Callable[[], T], device: torch.device) -> tuple[T, Elapsed]:
    """The call's result and what it took; on CUDA the device is waited for on both sides."""
    _wait(device)
    wall, process = time.perf_counter(), time.process_time()
    result = call()
    _wait(device)
    return result, Elapsed(time.perf_counter() - wall, time.process_time() - process)


def turn(arms: int, batch: int) -> list[int]:
    """The order of the arms in a batch: each goes first in its turn, so none always finds a warm cache."""
    first = batch % arms
    return [*range(first, arms), *range(first)]


def ratio_summary(stock: Sequence[float], arm: Sequence[float]) -> dict[str, float | int]:
    """How many times faster than stock: median over batches of stock / arm, quartiles, and of the totals."""
    ratios = np.asarray(stock) / np.asarray(arm)
    low, middle, high = np.percentile(ratios, [25, 50, 75])
    return {
        "median": float(middle),
        "quartile_25": float(low),
        "quartile_75": float(high),
        "total": float(np.sum(stock) / np.sum(arm)),
        "batches": len(ratios),
    }


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensor storages made while it is on, and the most that were alive at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = {_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and _key(leaf) not in before | self._seen:
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._seen.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size


def _key(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def peak_bytes(call: Callable[[], object], device: torch.device) -> tuple[int, str]:
    """Bytes at the peak of one call beyond what was there before it, and how they were counted.

    On CUDA the allocator's high-water mark; on the CPU the bytes of all tensor storages that operators
    return, which leaves out the inner scratch of a kernel but has no noise.
    """
    if device.type == "cuda":
        _wait(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        _wait(device)
        return torch.cuda.max_memory_allocated(device) - before, "max_memory_allocated"
    with _LiveBytes() as count:
        call()
    return count.peak, "tensor bytes returned by operators"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
