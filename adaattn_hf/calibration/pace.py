"""How long a calibration takes: a few steps on short sequences, scaled to its lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..stats.stopwatch import timed
from .settings import CalibrationSettings

FORETOLD = 256
"""Sequences of no more tokens soon tell by themselves how long a calibration takes."""
SHORTEST, PARTS = 128, 8
"""Tokens of the first sequence that steps are timed on, at least, and as a part of the longest: it adds to the work."""
PLANS = 1.5
"""Plans that are verified on average: one, and half of the time a bolder or a smaller one."""
SEARCHED = 3
"""Whole plans that a search measures as a rule."""
FIRST_LOOKS = 1.5
"""Sequences that one is verified on as a rule, by those of the first look."""


@dataclass(frozen=True)
class Pace:
    """Seconds of the steps for one sequence of each length.

    `moments` is the pass that finds the layers, `pair` one with exact attention and one with a plan, compared. `risk`
    are the passes that measure risks, `prices` times all choices, for all sequences together.
    """

    moments: Mapping[int, float]
    pair: Mapping[int, float]
    risk: Mapping[int, float]
    prices: Mapping[int, float]

    def stages(self, s: CalibrationSettings, size: int) -> dict[str, float]:
        """Returns the seconds of each stage for so many processes; `plans` is all that follows for one budget."""
        plan = sum(self.plan(s, size, dict.fromkeys(s.lengths, FIRST_LOOKS * s.held_out)).values())
        return {
            "moments": sum(self.moments.values()),
            "risk": sum(self.risk.values()) * (s.sequences + 1) / size,  # the first one is asked for needles, too
            "prices": sum(self.prices.values()),
            "plans": min(PLANS, s.tries + s.bolder) * plan + self.speed(s),
        }

    def plan(self, s: CalibrationSettings, size: int, sequences: Mapping[int, float]) -> dict[str, float]:
        """Returns the seconds that a plan takes which is verified on so many held-out sequences of each length."""
        searched = (s.joint + min(s.haystacks, s.joint)) * (1 + SEARCHED) / 2
        looks = {f"verify {length}": (many + s.haystacks) * self.pair[length] for length, many in sequences.items()}
        stages = {"joint": searched * sum(self.pair.values()), **looks}
        return {stage: seconds / size for stage, seconds in stages.items()}

    def speed(self, s: CalibrationSettings) -> float:
        """Returns the seconds that timing whole passes takes."""
        return (s.rounds + 1) * sum(self.pair.values()) * s.batch if s.rounds else 0.0


def seconds_at(
    lengths: Sequence[int], device: torch.device, step: Callable[[int], Callable[[], object]]
) -> dict[int, float]:
    """Returns the seconds of a step by length; `step` prepares it for so many tokens. Two short sequences are timed."""

    def seconds(tokens: int) -> float:
        call = step(tokens)
        return min(timed(call, device)[1].wall for _ in range(2))  # the first one compiles, or finds memory

    few = max(SHORTEST, lengths[-1] // PARTS)
    many = min(2 * few, lengths[-1])
    short, long = seconds(few), seconds(many)
    square = (long / many - short / few) / (many - few)
    if square > 0.0:  # tokens, and their pairs
        return {length: length * (short / few + square * (length - few)) for length in lengths}
    slope = max(long - short, 0.0) / (many - few)
    return {length: max(long + slope * (length - many), 0.0) for length in lengths}
