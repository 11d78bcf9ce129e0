"""How long a calibration takes: a few steps on short sequences, scaled to its lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..stats.stopwatch import timed
from .settings import CalibrationSettings

SHORTEST = 256
"""Tokens of the first sequence that steps are timed on; twice as many follow."""
QUICK = 0.1
"""Steps that take longer, seconds, are timed on no longer sequence: this comes on top of the work."""
PLANS = 1.5
"""Plans that are verified on average: one, and half of the time a bolder or a smaller one."""
SEARCHED = 3
"""Whole plans that a search measures as a rule."""
FIRST_LOOKS = 1.5
"""Sequences that one is verified on as a rule, by those of the first look."""


@dataclass(frozen=True)
class Pace:
    """What steps take for one sequence of each length: seconds, or numbers in proportion to them.

    Attributes:
        moments: The pass that finds the layers.
        exact: A pass with exact attention.
        compare: One with a plan, compared with the exact one.
        risk: The passes that measure risks.
        prices: Timing all choices, for all sequences together.
        size: Processes that share the work.
    """

    moments: Mapping[int, float]
    exact: Mapping[int, float]
    compare: Mapping[int, float]
    risk: Mapping[int, float]
    prices: Mapping[int, float]
    size: int = 1

    @classmethod
    def guess(cls, s: CalibrationSettings) -> Pace:
        """Returns that of a model of which nothing is known but that its layers outweigh their attention."""
        one, risk, prices = ({length: float(n * length) for length in s.lengths} for n in (1, 4 + 2 * s.labels, 4))
        return cls(one, one, one, risk, prices)

    def stages(self, s: CalibrationSettings, generates: bool = True) -> dict[str, float]:
        """Returns what each stage takes; `plans` is all that follows the prices for one budget."""
        plan = sum(self.plan(s, dict.fromkeys(s.lengths, FIRST_LOOKS * s.held_out), generates).values())
        return {
            "moments": sum(self.moments.values()),
            "risk": sum(self.risk.values()) * (s.sequences + generates) / self.size,
            "prices": sum(self.prices.values()),
            "plans": min(PLANS, s.tries + s.bolder) * plan + self.speed(s),
        }

    def plan(self, s: CalibrationSettings, sequences: Mapping[int, float], generates: bool = True) -> dict[str, float]:
        """Returns what search and verification of one plan take, on so many held-out sequences of each length."""
        needles = s.haystacks * generates
        searched = {
            length: s.joint * (self.exact[length] + SEARCHED * self.compare[length])
            + min(needles, s.joint) * (1 + SEARCHED) * self.exact[length]
            for length in s.lengths
        }
        return {
            "joint": sum(searched.values()) / self.size,
            **{
                f"verify {length}": (
                    many * (self.exact[length] + self.compare[length]) + 2 * needles * self.exact[length]
                )
                / self.size
                for length, many in sequences.items()
            },
        }

    def speed(self, s: CalibrationSettings) -> float:
        """Returns what timing whole passes takes."""
        return 2 * (s.rounds + 1) * sum(self.exact.values()) * s.batch if s.rounds else 0.0


def seconds_at(
    lengths: Sequence[int], device: torch.device, step: Callable[[int], Callable[[], object]]
) -> dict[int, float]:
    """Returns the seconds of a step by length; `step` prepares it for so many tokens. Short sequences are timed."""

    def seconds(tokens: int) -> float:
        call = step(tokens)
        took = timed(call, device)[1].wall
        # the first one compiles, or finds memory
        return timed(call, device)[1].wall if took < QUICK or device.type == "cuda" else took

    few = many = min(SHORTEST, lengths[0])
    took = {few: seconds(few)}
    while many < lengths[-1] and (few == many or took[many] < QUICK):
        few, many = many, min(2 * many, lengths[-1])
        took[many] = seconds(many)
    square = 0.0 if few == many else (took[many] / many - took[few] / few) / (many - few)
    slope = 0.0 if few == many else max(took[many] - took[few], 0.0) / (many - few)
    # tokens and their pairs, or what takes a while whatever their number
    grown = {
        length: length * (took[few] / few + square * (length - few))
        if square > 0.0
        else took[many] + slope * (length - many)
        for length in lengths
    }
    return {length: took.get(length, grown[length]) for length in lengths}
