"""Seconds of calls that take turns, what is made of them (spreads, ratios), and bytes at a call's peak."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from adaattn_hf.backends.native import library
from adaattn_hf.policy.silence import silenced
from adaattn_hf.stats.stopwatch import in_turn, wait

STDERR = 2
_SAMPLE_SECONDS = 0.01
"""Shorter samples drown in the clock and the scheduler."""
_FAR, _FEW = 10, 2
"""A way that takes so many times as long as the first is no rival, and is timed in so many rounds."""


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles of these very values, as numpy has them."""
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return {"median": middle, "quartile_25": low, "quartile_75": high}


def turn(arms: int, batch: int) -> list[int]:
    """The order of the arms in a batch: each goes first in its turn, so none always finds a warm cache."""
    first = batch % arms
    return [*range(first, arms), *range(first)]


def ratio_summary(stock: Sequence[float], arm: Sequence[float]) -> dict[str, float | int]:
    """How many times faster than stock: median over batches of stock / arm, quartiles, and of the totals."""
    ratios = [first / second for first, second in zip(stock, arm, strict=True)]
    return {**spread(ratios), "total": sum(stock) / sum(arm), "batches": len(ratios)}


def measure(
    ways: Mapping[str, Callable[[], object]], rounds: int, device: torch.device
) -> dict[str, dict[str, list[float]]]:
    """Seconds of wall and process time per way and round; the order turns around every round.

    Every way runs twice before its samples are taken. One that takes over ten times as long as the first has two
    rounds. On CUDA every sample ends with a synchronisation.
    """
    alone = {name: max(min(one.wall for one in runs), 1e-7) for name, runs in in_turn(ways, device, 2).items()}
    repeats = {name: max(1, round(_SAMPLE_SECONDS / seconds)) for name, seconds in alone.items()}
    rivals = {name: work for name, work in ways.items() if alone[name] <= _FAR * next(iter(alone.values()))}
    runs = in_turn(ways, device, min(rounds, _FEW), repeats)
    for name, more in in_turn(rivals, device, rounds - _FEW, repeats).items():
        runs[name] += more
    return {
        name: {"wall": [r.wall for r in times], "process": [r.process for r in times]} for name, times in runs.items()
    }


def peak_bytes(call: Callable[[], object], device: torch.device) -> tuple[int, str]:
    """Bytes at the peak of one call beyond what was there before it, and how they were counted.

    On CUDA the allocator's high-water mark. On the CPU the peak of torch's allocations that the profiler recorded, plus
    that of the native kernels, which have an allocator of their own; the two may not fall together.
    """
    if device.type == "cuda":
        wait(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        wait(device)
        return torch.cuda.max_memory_allocated(device) - before, "max_memory_allocated"
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    library.reset_peak()
    with silenced(STDERR):  # the profiler's library reports its start and stop, whatever its log level
        profile.start()
    try:
        call()
    finally:
        with silenced(STDERR):
            profile.stop()
    recorded: Any = profile.profiler
    events: list[Any] = [e for e in recorded.kineto_results.events() if e.name() == "[memory]"]
    bytes_held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        bytes_held += event.nbytes()
        peak = max(peak, bytes_held)
    return int(peak) + library.peak_bytes(), "torch's allocations and the native kernels' buffers"
