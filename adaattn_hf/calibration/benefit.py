"""Times whole forward passes with and without a plan, in turn, and reports the speed-up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature

import numpy as np
import torch

from ..attention.listeners import Tap, tapping
from ..plans.program import Program
from ..stats.paired import clustered_ratio
from ..stats.stopwatch import timed
from .arms import exact_tap, plan_tap
from .inputs import Inputs

CONFIDENCE = 0.95
MOST_ROUNDS = 15
"""Largest number of rounds, reached by short passes."""
WORTH = 5.0
"""Further rounds are added for so many seconds."""


@dataclass(frozen=True)
class Benefit:
    """Speed-up of a whole forward pass of `batch` sequences over exact attention.

    `ratio` is the geometric mean over rounds of one exact and one planned pass each; `low` and `high` its two-sided 95
    % interval, by Student's t on the logarithms; `clock` is `time` or `CPU time`.
    """

    length: int
    ratio: float
    low: float
    high: float
    rounds: int
    clock: str
    batch: int = 1

    def sentence(self) -> str:
        """Returns the speed-up in words."""
        slower = "; slower: leave the plan out here, or measure with the batch that is served (--batch-size)"
        several = f"{self.batch} times " * (self.batch > 1)
        return (
            f"whole forward pass of {several}{self.length} tokens: {self.ratio:.2f} times as fast as exact "
            f"(95 %: {self.low:.2f} to {self.high:.2f}, {self.clock}, {self.rounds} rounds)"
            f"{slower * (self.high < 1.0)}"
        )


@torch.no_grad()
def whole_forward(inputs: Inputs, programs: Mapping[int, Program], rounds: int) -> list[Benefit]:
    """Returns the speed-up of the whole forward pass, with the head on the last token, at each length.

    Rounds are at least two and as many as asked for, more where a pass is short.
    """
    found = []
    for number, (length, sample) in enumerate(inputs.samples.items()):
        inputs.refuse_late(together=False)
        inputs.progress("speed", number, len(inputs.samples))
        tokens = inputs.readings(sample.joint[0])[0].tokens.repeat(inputs.settings.batch, 1)
        seconds = _seconds(inputs, tokens, {"exact": exact_tap, "plan": plan_tap(programs)}, rounds)
        logs = np.log(np.array(seconds["exact"]) / np.array(seconds["plan"]))
        ratio, clock = clustered_ratio(logs, np.ones(len(logs))), "time" if tokens.is_cuda else "CPU time"
        high = ratio.upper((1 + CONFIDENCE) / 2)
        limits = math.exp(ratio.mean), math.exp(2 * ratio.mean - high), math.exp(high)
        found.append(Benefit(length, *limits, len(logs), clock, inputs.settings.batch))
    inputs.progress("speed", len(inputs.samples), len(inputs.samples))
    return found


def _seconds(inputs: Inputs, tokens: torch.Tensor, taps: Mapping[str, Tap], rounds: int) -> dict[str, list[float]]:
    model = inputs.arms.model
    options = {"logits_to_keep": 1} if "logits_to_keep" in signature(model.forward).parameters else {}
    if "use_cache" in signature(model.forward).parameters:
        options["use_cache"] = False
    found: dict[str, list[float]] = {name: [] for name in taps}
    spent, turn = 0.0, -1
    while turn < rounds or (turn < MOST_ROUNDS and spent < WORTH):
        turn += 1
        for name, tap in taps.items():
            with tapping(tap):
                elapsed = timed(lambda: model(input_ids=tokens, **options), tokens.device)[1]
            seconds = elapsed.wall if tokens.is_cuda else elapsed.process
            spent += seconds
            if turn:
                found[name].append(seconds)
    return found
