"""Times calls beside one another, in turn, so that what else the machine does strikes all alike.

On CUDA the time of a call is the device's, with nothing of it in the L2 cache, or the host's where that is longer.
The device is kept busy while the host prepares a call, so that neither time holds the other; a run in which the host
needed longer than that is made again behind more work, unless no work is enough.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

Calls = Mapping[str, Callable[[], Any]]
Clock = Callable[[Calls], Mapping[str, list[float]]]
"""Maps calls to microseconds of several runs of each."""

ROUNDS, FEWER, PATIENCE = 11, 5, 0.5
"""Runs of each call; how many where a round of all takes more than so many seconds."""
_LEAST = 5e-4
"""Seconds of a run, below which a processor repeats the call: clocks are coarse."""
_COLD_BYTES = 1 << 28
_WRITES, _MOST_WRITES = 8, 256
"""Least and most times that so many bytes are written before a call: half a millisecond on the fastest devices is
enough for most hosts, and a call that waits for the device is never ahead of it."""


def clock_of(device: str, host: bool = True) -> Clock:
    """The clock of a device.

    Args:
        device: Type of the device.
        host: On CUDA, whether the host's time counts where it is longer: not for calls that the host runs ahead of.
    """
    return partial(_on_device, host=host) if device == "cuda" else _on_processor


def _rounds(calls: Calls) -> Iterator[list[str]]:
    """Names of the calls, as often as there is patience for, another one first each time."""
    names, started = list(calls), time.perf_counter()
    for number in range(ROUNDS):
        if number >= FEWER and time.perf_counter() - started > PATIENCE * number:
            return
        turn = number % max(len(names), 1)
        yield names[turn:] + names[:turn]


def _on_processor(calls: Calls) -> dict[str, list[float]]:
    """By the wall clock."""
    repeats, runs = {}, {name: [] for name in calls}  # type: dict[str, int], dict[str, list[float]]
    for name, call in calls.items():
        started = time.perf_counter()
        call()
        repeats[name] = max(1, int(_LEAST / (time.perf_counter() - started)))
    for names in _rounds(calls):
        for name in names:
            call, started = calls[name], time.perf_counter()
            for _ in range(repeats[name]):
                call()
            runs[name].append((time.perf_counter() - started) / repeats[name] * 1e6)
    return runs


def _on_device(calls: Calls, host: bool) -> dict[str, list[float]]:
    """By events, and by the time that the host is busy."""
    runs: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()  # compiles, and finds what later calls share
    cold = torch.empty(_COLD_BYTES, dtype=torch.int8, device="cuda")
    writes = dict.fromkeys(calls, _WRITES)
    for names in _rounds(calls):
        for name in names:
            busy = _host(calls[name]) if host else 0.0
            while True:
                device, share = _device(calls[name], cold, writes[name])
                if share <= 1 or writes[name] == _MOST_WRITES:
                    break
                # the device waited for the host: this was not the kernels' time alone
                writes[name] = min(math.ceil(2 * share * writes[name]), _MOST_WRITES)
            runs[name].append(max(device, busy))
    return runs


def _host(call: Callable[[], Any]) -> float:
    """Microseconds that the host is busy with a call, as in a layer behind another one of its kind."""
    call()  # whose code is in the host's caches then
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e6


def _device(call: Callable[[], Any], cold: torch.Tensor, writes: int) -> tuple[float, float]:
    """Microseconds of a call on the device, and the time until the host is done per that of the writes."""
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
    return first.elapsed_time(last) * 1e3, (ended - began) / (begin.elapsed_time(first) * 1e-3)


def quartiles(runs: list[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile."""
    low, middle, high = (round(x, 3) for x in statistics.quantiles(runs, n=4))
    return low, middle, high
