"""Interleaved timing of several ways to do the same work."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from adaattn_hf.stats.stopwatch import in_turn

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
    alone = {name: max(min(one.wall for one in runs), 1e-7) for name, runs in in_turn(ways, device, 2).items()}
    repeats = {name: max(1, round(_SAMPLE_SECONDS / seconds)) for name, seconds in alone.items()}
    rivals = {name: work for name, work in ways.items() if alone[name] <= _FAR * next(iter(alone.values()))}
    runs = in_turn(ways, device, min(rounds, _FEW), repeats)
    for name, more in in_turn(rivals, device, rounds - _FEW, repeats).items():
        runs[name] += more
    return {name: {"wall": [r.wall for r in own], "process": [r.process for r in own]} for name, own in runs.items()}
