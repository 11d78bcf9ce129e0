"""Searches for a plan: solves the knapsack within a budget, and measures whole plans on calibration text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from adaattn_hf.eval.arms import compare, exact_tap, stored_tap
from adaattn_hf.eval.needles import compared, retrieved

from ..attention.listeners import Tap
from ..plans.limits import Gates
from ..policy.aim import LossLaw, Observation
from ..policy.knapsack import CACHE_GAP, GAP, Allocation, Array, allocate
from ..stats.paired import TokenScores, joined
from .layers import Measurement, Picks, bound_layers

JOINT_STEPS = 5
"""Largest number of plans that are measured before one is verified."""
MOST_JOINT_STEPS = 8
"""The same while none was within the limit."""
TOLERANCE = 0.03
"""Share by which a plan may exceed the limit, which is small compared with the margin to the budget."""
LEAST_KL = 1e-9
"""Smallest KL that is aimed at, nats/token."""
VISIBLE = 0.1
"""Share of the KL of rounding that a plan must add to be distinguished from exact attention."""
CLOSE = 0.85
"""A plan that uses at least this share of the limit is close enough."""
SHRINK = 0.7
"""After a plan beyond the limit the next one is predicted to have at most this share of its KL.

In half precision the KL falls more slowly than predicted: a part of it is rounding that nobody measured.
"""
GROW = 1.25
"""After a plan within the limit the next one is predicted to have at least so many times its KL."""
REHEARSED = 0.2
"""Significance level of the sign test on needles lost in calibration text: a margin to that of the proof."""


def solve(measurement: Measurement, budget: Array, needles: Mapping[int, float] | None = None) -> Allocation:
    """Returns the cheapest allocation within a budget per length; `needles` limits risks for retrieval, by length."""
    limited = needles or {}
    risks = np.stack([*measurement.risks(), *(measurement.state.needles[length] for length in limited)])
    limits = np.append(budget, list(limited.values()))
    gap, launches = (CACHE_GAP, None) if measurement.inputs.settings.with_cache else (GAP, measurement.launches)
    found = allocate(measurement.costs, risks, limits, launches, gap)
    return replace(found, risk=found.risk[: len(budget)])


@dataclass(frozen=True)
class Joint:
    """The measured loss of a whole plan on calibration text.

    Attributes:
        kl: Mean KL, nats/token, with that of rounding.
        flips: Share of tokens whose likeliest token changes.
        kl_p999: 99.9th percentile of the KL of a token, nats.
        observed: Loss of each sequence.
        rounding: Mean KL of two exact implementations, nats/token.
        needles: Those that the plan loses, those that only it finds, and those that exact attention finds.
        risk: The plan's risk for retrieval.
    """

    kl: float
    flips: float
    kl_p999: float
    observed: Observation
    rounding: float = 0.0
    needles: tuple[int, int, int] = (0, 0, 0)
    risk: float = 0.0

    @property
    def added(self) -> float:
        """What the plan adds to the KL of rounding, nats/token."""
        return max(self.kl - self.rounding, LEAST_KL)

    @property
    def visible(self) -> float:
        """The same, but at least what can be distinguished from rounding: risks are re-scaled by it, so it is not 0."""
        return max(self.added, VISIBLE * self.rounding)


@dataclass(frozen=True, eq=False)
class JointPasses:
    """Measures whole plans on calibration text; `rounding` is the mean KL of two exact implementations, nats/token."""

    measurement: Measurement
    rounding: float = 0.0

    def joint(self, picks: Picks, length: int, stored: str = "model") -> Joint:
        """Returns the loss of an allocation on calibration text, over a cache of the format `stored`."""
        inputs = self.measurement.inputs
        tap = stored_tap(bound_layers(self.measurement, picks), stored)
        sequences = inputs.samples[length].joint

        def measured(number: int) -> tuple[TokenScores, list[tuple[bool, bool]]]:
            inputs.refuse_late(together=False)
            windows, place = inputs.windows(sequences[number]), (length, number)
            if place not in inputs.states:
                inputs.states[place] = [inputs.arms.exact(one).cpu() for one in windows]
            exact = zip(windows, inputs.states[place], strict=True)
            score = joined([compare(inputs.arms, one, tap, state) for one, state in exact])
            return score, self.needles(length, number, tap) if picks.any() else []

        scores, found = zip(*inputs.team.work(range(len(sequences)), measured), strict=True)
        sources = tuple(sequence.source for sequence in sequences)
        kl = float(np.mean([one.kl.mean() for one in scores]))
        return Joint(
            kl=kl,
            flips=1.0 - float(np.mean([one.agree.mean() for one in scores])),
            kl_p999=float(np.quantile(np.concatenate([one.kl[0] for one in scores]), 0.999)),
            observed=Observation(kl, np.array([one.delta.mean() for one in scores]), sources),
            rounding=self.rounding,
            needles=compared([*chain(*found)]),
            risk=float(self.measurement.state.needles[length][np.arange(len(picks)), picks].sum()),
        )

    def needles(self, length: int, number: int, tap: Tap) -> list[tuple[bool, bool]]:
        """Returns for each needle in a sequence whether exact attention finds it, and whether a plan does.

        Nothing of the proof is used up: its text is other text, and its needles are others.
        """
        inputs, place = self.measurement.inputs, (length, number)
        if not inputs.scoring.generates or number >= inputs.settings.haystacks:
            return []
        if place not in inputs.haystacks:
            generator = torch.Generator().manual_seed(inputs.settings.seed)
            haystack = inputs.haystack(inputs.samples[length].joint[number], generator)
            inputs.haystacks[place] = haystack, retrieved(inputs.arms, haystack, exact_tap)
        haystack, exact = inputs.haystacks[place]
        return list(zip(exact, retrieved(inputs.arms, haystack, tap), strict=True))


@dataclass(frozen=True)
class Aim:
    """The target of the next plan.

    Attributes:
        laws: By length, the law of loss per KL.
        level: Error rate of the verification.
        share: Share of the budget at which the predicted bound is aimed.
        looks: Held-out sequences of the first look, and of the last.
        beside: By length, KL that the cache's format adds, nats/token.
        least: By length, KL that is tried whatever the laws afford, nats/token.
        needles: By length, the risk for retrieval that a plan may have, where plans have lost too many needles.
        joints: By length, the plans that were measured on calibration text.
    """

    laws: Mapping[int, LossLaw]
    gates: Gates
    level: float
    share: float
    looks: tuple[int, int]
    beside: Mapping[int, float] = field(default_factory=dict)
    least: Mapping[int, float] = field(default_factory=dict)
    needles: Mapping[int, float] = field(default_factory=dict)
    joints: Mapping[int, Sequence[Joint]] = field(default_factory=dict)

    def sequences(self, length: int) -> int:
        """Returns how many held-out sequences the verification needs at a length."""
        return self.laws[length].shard(self.share * self.gates.budget, *self.looks, self.level)

    def affordable(self, length: int, flips_per_root: float = 0.0) -> float:
        """Returns the largest KL that a plan may add to that of rounding and keep all gates with a margin, nats/token.

        The flips per token over the square root of the KL are 0 until measured.
        """
        budget = self.share * self.gates.budget
        limits = [self.laws[length].affordable(budget, self.sequences(length), self.level), budget]
        if flips_per_root > 0.0:
            limits.append((self.share * (1.0 - self.gates.least_top1) / flips_per_root) ** 2 - self.gates.rounding)
        return max(min(limits) - self.beside.get(length, 0.0), self.least.get(length, LEAST_KL))


@dataclass(frozen=True)
class Found:
    """The plan that a search chose: its choices, and by length its measured loss on calibration text.

    `predicted` is by length its re-scaled risk before it was measured, nats/token.
    """

    allocation: Allocation
    joint: Mapping[int, Joint]
    predicted: Mapping[int, float]


def seek(
    passes: JointPasses,
    aim: Aim,
    alpha: Array,
    history: list[dict[str, Any]],
    update: Callable[[Aim, int, list[Joint]], Aim],
) -> tuple[Found | None, Array, Aim]:
    """Returns the cheapest plan that is predicted to keep all gates, `None` if none saves anything, and what it taught.

    The first plan is chosen by its sum of risks, and its measured KL re-scales the risks at every length (`alpha`).
    From then on one factor scales the limit at all lengths; it is bracketed between a plan within the limit and one
    beyond it. A plan that loses needles has lowered the limit on the risk for retrieval, and is followed by one within
    that. Predictions and measurements join the history; `update` makes an aim of the plans measured at a length.
    """
    measurement = passes.measurement
    lengths, progress = measurement.inputs.settings.lengths, measurement.inputs.run.progress
    within: Found | None = None
    low, high, scale = 0.0, math.inf, 1.0
    seen: dict[int, list[Joint]] = {length: [] for length in lengths}
    afforded = np.array([aim.affordable(length) for length in lengths])
    for step in range(MOST_JOINT_STEPS):
        if step >= JOINT_STEPS and within is not None:
            break
        measurement.inputs.refuse_late()
        progress("joint", min(step, JOINT_STEPS - 1), JOINT_STEPS)
        found = solve(measurement, scale * afforded / alpha, aim.needles)
        if not found.picks.any() or (within and np.array_equal(found.picks, within.allocation.picks)):
            break
        joint = {length: passes.joint(found.picks, length) for length in lengths}
        for length in lengths:
            seen[length].append(joint[length])
            aim = update(aim, length, seen[length])
        measured = np.array([joint[length].added for length in lengths])
        visible = np.array([joint[length].visible for length in lengths])
        predicted = found.risk * alpha
        if step == 0:  # re-scale the sums of risks, where there is any
            alpha = alpha * np.divide(visible, predicted, out=np.ones_like(predicted), where=predicted > 0.0)
        afforded = np.array([aim.affordable(length, _flips_per_root(seen[length])) for length in lengths])
        reached = float((measured / afforded).max())
        retrieves = not any(aim.gates.forgets(*one.needles, REHEARSED) for one in joint.values())
        history.append(
            {
                "predicted": predicted.tolist(),
                "measured": measured.tolist(),
                "afforded": afforded.tolist(),
                "flips": [joint[length].flips for length in lengths],
                "kl_p999": [joint[length].kl_p999 for length in lengths],
                "delta_nll": [float(joint[length].observed.deltas.mean()) for length in lengths],
                "needles": [joint[length].needles for length in lengths],
            }
        )
        fits = reached <= 1.0 + TOLERANCE
        if fits and retrieves:
            if within is None or found.price < within.allocation.price:
                within = Found(found, joint, dict(zip(lengths, predicted.tolist(), strict=True)))
            if reached >= CLOSE:
                break
        if step == 0 or (fits and not retrieves):
            continue
        step_to = 1.0 / float((visible / afforded).max())
        if fits:
            low, step_to = scale, float(np.clip(step_to, GROW, 4.0))
        else:
            high, step_to = scale, float(np.clip(step_to, 0.25, SHRINK))
        bracketed = low > 0.0 and high < math.inf
        scale = math.sqrt(low * high) if bracketed else scale * step_to
    progress("joint", JOINT_STEPS, JOINT_STEPS)
    return within, alpha, aim


def _flips_per_root(joints: Sequence[Joint]) -> float:
    measured = [joint.flips / math.sqrt(joint.kl) for joint in joints if joint.kl > 0.0]
    return float(np.median(measured)) if measured else 0.0
