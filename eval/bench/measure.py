"""Interleaved timing of several ways to do the same work."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from adaattn_hf.stats.stopwatch import timed

from .work import Work

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
        seconds = timed(work, device)[1].wall
        repeats[name] = max(1, round(_SAMPLE_SECONDS / max(seconds, 1e-7)))
    samples: dict[str, dict[str, list[float]]] = {name: {"wall": [], "process": []} for name in ways}
    names = list(ways)
    for index in range(rounds):
        for name in names if index % 2 == 0 else names[::-1]:
            elapsed = timed(ways[name], device, repeats[name])[1]
            samples[name]["wall"].append(elapsed.wall)
            samples[name]["process"].append(elapsed.process)
    return samples
