"""The stopwatch: how long calls take, by the clock, on the processor, and on a CUDA device.

`timed` takes one call, `in_turn` several, so that other load on the machine strikes all alike. So does `on_device` on
CUDA, where each finds nothing of its operands in the L2 cache. The device is kept busy while the host prepares a call,
so that neither time holds the other; where the host needed longer, the call is repeated after more work.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

T = TypeVar("T")
K = TypeVar("K")

ROUNDS, FEWER, PATIENCE = 11, 5, 0.5
"""Runs of each call; how many where a round of all takes more than so many seconds."""
_COLD_BYTES = 1 << 28
_WRITES, _MOST_WRITES = 8, 256
"""Least and most times that so many bytes are written before a call: half a millisecond on the fastest devices is
enough for most hosts, and a call that waits for the device is never ahead of it."""


@dataclass(frozen=True)
class Elapsed:
    """Seconds of one call: by the clock, and of the processor (all threads of this process)."""

    wall: float
    process: float


def wait(device: torch.device) -> None:
    """Waits until a CUDA device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(call: Callable[[], T], device: torch.device, repeats: int = 1) -> tuple[T, Elapsed]:
    """The last result of `repeats`, for calls shorter than the clock is fine, and the time of one; waits for CUDA."""
    wait(device)
    wall, process = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        result = call()
    wait(device)
    wall, process = time.perf_counter() - wall, time.process_time() - process
    return result, Elapsed(wall / repeats, process / repeats)


def in_turn(
    calls: Mapping[K, Callable[[], object]], device: torch.device, rounds: int, repeats: Mapping[K, int] | None = None
) -> dict[K, list[Elapsed]]:
    """Returns the times of several calls that take turns, so that other load on the machine strikes all alike.

    Every second round goes backwards. A call is repeated so many times in its turn as `repeats` says, once by default.
    One in another process has `seconds`, which gives the time of so many calls by the clocks there.
    """
    runs: dict[K, list[Elapsed]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in list(calls) if number % 2 == 0 else list(calls)[::-1]:
            call, times = calls[name], 1 if repeats is None else repeats[name]
            elsewhere: Callable[[int], Elapsed] | None = getattr(call, "seconds", None)
            runs[name].append(timed(call, device, times)[1] if elsewhere is None else elsewhere(times))
    return runs


def on_device(calls: Mapping[K, Callable[[], Any]], host: bool = True) -> dict[K, list[float]]:
    """Seconds of several runs of each call on the current CUDA device, by events.

    Each call runs once before it is timed, so that what it compiles is compiled. With `host` the host's time counts
    where it is longer: not for calls that the host runs ahead of.
    """
    runs: dict[K, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    cold = torch.empty(_COLD_BYTES, dtype=torch.int8, device="cuda")
    names, writes, started = list(calls), dict.fromkeys(calls, _WRITES), time.perf_counter()
    for number in range(ROUNDS):
        if number >= FEWER and time.perf_counter() - started > PATIENCE * number:
            break
        turn = number % max(len(names), 1)
        for name in names[turn:] + names[:turn]:
            busy = 0.0
            if host:
                calls[name]()  # whose code is in the host's caches then, as in a layer behind another one of its kind
                torch.cuda.synchronize()
                began = time.perf_counter()
                calls[name]()
                busy = time.perf_counter() - began
            while True:
                device, share = _device(calls[name], cold, writes[name])
                if share <= 1 or writes[name] == _MOST_WRITES:
                    break
                # the device waited for the host: this was not only the kernels' time
                writes[name] = min(math.ceil(2 * share * writes[name]), _MOST_WRITES)
            runs[name].append(max(device, busy))
    return runs


def _device(call: Callable[[], Any], cold: torch.Tensor, writes: int) -> tuple[float, float]:
    """Seconds of a call on the device, and the time until the host is done per that of the writes."""
    begin, first, last = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    torch.cuda.synchronize()
    began = time.perf_counter()
    begin.record()
    for _ in range(writes):
        cold.zero_()
    first.record()
    call()
    ended = time.perf_counter()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) * 1e-3, (ended - began) / (begin.elapsed_time(first) * 1e-3)


def quartiles(runs: list[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile of all runs there could be: of few, wider apart than numpy's."""
    return tuple(statistics.quantiles(runs, n=4))  # type: ignore[return-value]
