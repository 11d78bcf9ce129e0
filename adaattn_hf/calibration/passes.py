"""Whole passes: how much faster they are by a plan, and how far two stock implementations lie apart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from inspect import signature

import numpy as np
import torch
from torch import Tensor, nn

from adaattn_hf.eval.arms import compare, exact_tap, plan_tap
from adaattn_hf.eval.windows import TokenWindow

from ..attention.call import AttentionCall
from ..attention.listeners import Tap, tapping
from ..backends import select
from ..plans.bound_layer import BoundLayer
from ..stats.paired import clustered_ratio
from ..stats.stopwatch import in_turn
from .inputs import Inputs

TOKENS = 1024
"""Tokens compared: the eager implementation holds the whole score matrix."""
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
def whole_forward(inputs: Inputs, bound_layers: Mapping[int, BoundLayer], rounds: int) -> list[Benefit]:
    """Returns the speed-up of the whole forward pass, with the head on the last token, at each length.

    Rounds are at least two and as many as asked for, more where a pass is short.
    """
    found = []
    for number, (length, sample) in enumerate(inputs.samples.items()):
        inputs.refuse_late(together=False)
        inputs.run.progress("speed", number, len(inputs.samples))
        tokens = inputs.arms.tokens(inputs.windows(sample.joint[0])[0]).repeat(inputs.settings.batch, 1)
        seconds = _seconds(inputs, tokens, {"exact": exact_tap, "plan": plan_tap(bound_layers)}, rounds)
        logs = np.log(np.array(seconds["exact"]) / np.array(seconds["plan"]))
        ratio, clock = clustered_ratio(logs, np.ones(len(logs))), "time" if tokens.is_cuda else "CPU time"
        high = ratio.upper((1 + CONFIDENCE) / 2)
        limits = math.exp(ratio.mean), math.exp(2 * ratio.mean - high), math.exp(high)
        found.append(Benefit(length, *limits, len(logs), clock, inputs.settings.batch))
    inputs.run.progress("speed", len(inputs.samples), len(inputs.samples))
    return found


def _seconds(inputs: Inputs, tokens: Tensor, taps: Mapping[str, Tap], rounds: int) -> dict[str, list[float]]:
    model, known = inputs.arms.model, signature(inputs.arms.model.forward).parameters
    options = {name: value for name, value in (("logits_to_keep", 1), ("use_cache", False)) if name in known}

    def passed(tap: Tap) -> None:
        with tapping(tap):
            model(input_ids=tokens, **options)

    calls = {name: partial(passed, tap) for name, tap in taps.items()}
    first = sum(one.wall if tokens.is_cuda else one.process for (one,) in in_turn(calls, tokens.device, 1).values())
    more = MOST_ROUNDS if first <= 0.0 else min(int(WORTH / first), MOST_ROUNDS)
    found = in_turn(calls, tokens.device, max(rounds, more))
    return {name: [one.wall if tokens.is_cuda else one.process for one in own] for name, own in found.items()}


@dataclass(frozen=True)
class StockDistance:
    """Eager compared with sdpa attention: share of tokens whose likeliest token differs, and mean KL in nats/token.

    In float32 the KL does not count.
    """

    flips: float
    kl: float


@torch.no_grad()
def stock_distance(inputs: Inputs) -> StockDistance:
    """Returns how far eager and sdpa attention lie apart.

    A layer that one of them cannot compute (a softcap, say) uses the backend that is chosen for it.
    """
    arms = inputs.arms
    tokens = inputs.windows(inputs.samples[min(inputs.samples)].joint[0])[0].input_ids[:TOKENS]
    window = TokenWindow("", tokens, None, tokens)  # every position counts, whatever token it is to predict

    def by(backend: str) -> Tap:
        def tap(module: nn.Module, call: AttentionCall) -> Tensor:
            refused = bool(select.refusals_of(backend, call.checked_kind(named=True)))
            return select.attend(call, None if refused else backend).out

        return tap

    with tapping(by("eager")):
        eager = arms.hidden(window)
    scores = compare(arms, window, by("sdpa"), eager)
    return StockDistance(float((~scores.agree).mean()), float(scores.kl.mean()))
