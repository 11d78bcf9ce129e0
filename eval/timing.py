"""What is made of measured seconds (spreads, ratios of interleaved calls), and bytes at a call's peak."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from adaattn_hf.backends.native import library
from adaattn_hf.policy.silence import silenced
from adaattn_hf.stats.stopwatch import wait

STDERR = 2


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
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
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return int(peak) + library.peak_bytes(), "torch's allocations and the native kernels' buffers"
