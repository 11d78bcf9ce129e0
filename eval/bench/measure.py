"""Interleaved timing of several ways to do the same work, and the memory that one of them takes."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from adaattn_hf.eval.bench.work import Work

__all__ = ["measure", "peak_bytes", "spread"]

# Shorter samples drown in the clock and the scheduler.
_SAMPLE_SECONDS = 0.01


def measure(ways: Mapping[str, Work], rounds: int, device: torch.device) -> dict[str, dict[str, list[float]]]:
    """Seconds of wall and process time per way and round; the order turns around every round.

    Args:
        ways: Name to work. Every way runs once before the clock starts.
        rounds: Samples per way.
        device: On CUDA every sample ends with a synchronisation.
    """
    repeats = {}
    for name, work in ways.items():
        work()
        seconds = _sample(work, 1, device)[0]
        repeats[name] = max(1, round(_SAMPLE_SECONDS / max(seconds, 1e-7)))
    found: dict[str, dict[str, list[float]]] = {name: {"wall": [], "process": []} for name in ways}
    names = list(ways)
    for index in range(rounds):
        for name in names if index % 2 == 0 else names[::-1]:
            wall, process = _sample(ways[name], repeats[name], device)
            found[name]["wall"].append(wall)
            found[name]["process"].append(process)
    return found


def _sample(work: Work, repeats: int, device: torch.device) -> tuple[float, float]:
    if device.type == "cuda":
        torch.cuda.synchronize()
    wall, process = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - wall) / repeats, (time.process_time() - process) / repeats


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    if len(values) == 1:
        return {"median": values[0], "quartile_25": values[0], "quartile_75": values[0]}
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": statistics.median(values), "quartile_25": low, "quartile_75": high}


def peak_bytes(work: Work, device: torch.device) -> int:
    """Most memory that one run holds at a time beyond what was held before.

    On CUDA the allocator tells; elsewhere the profiler's record of allocations does. The work has run before.
    """
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated() - before)
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with _unheard():
        profile.start()
    try:
        work()
    finally:
        with _unheard():
            profile.stop()
    recorded: Any = profile.profiler
    events: list[Any] = [e for e in recorded.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return int(peak)


@contextmanager
def _unheard() -> Iterator[None]:
    """The profiler's library reports its start and its stop on stderr, past Python and whatever its log level."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
