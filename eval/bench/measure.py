"""Interleaved timing of several ways to do the same work."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from adaattn_hf.stats.stopwatch import timed

from .work import Work

# Shorter samples drown in the clock and the scheduler.
_SAMPLE_SECONDS = 0.01
_FAR, _FEW = 10, 2
"""A way that takes so many times as long as the first is no rival, and is timed in so many rounds."""


def measure(ways: Mapping[str, Work], rounds: int, device: torch.device) -> dict[str, dict[str, list[float]]]:
    """Seconds of wall and process time per way and round; the order turns around every round.

    Every way runs twice before its samples are taken. One that takes over ten times as long as the first has two
    rounds. On CUDA every sample ends with a synchronisation.
    """
    alone = {}
    for name, work in ways.items():
        alone[name] = max(min(timed(work, device)[1].wall for _ in range(2)), 1e-7)
    few = {name for name, seconds in alone.items() if seconds > _FAR * next(iter(alone.values()))}
    samples: dict[str, dict[str, list[float]]] = {name: {"wall": [], "process": []} for name in ways}
    for index in range(rounds):
        names = [name for name in ways if index < _FEW or name not in few]
        for name in names if index % 2 == 0 else names[::-1]:
            elapsed = timed(ways[name], device, max(1, round(_SAMPLE_SECONDS / alone[name])))[1]
            samples[name]["wall"].append(elapsed.wall)
            samples[name]["process"].append(elapsed.process)
    return samples
