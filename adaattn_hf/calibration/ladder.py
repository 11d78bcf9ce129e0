"""Fixes the candidates of a budget, from safe to bold, before a word of held-out text is read.

Each is the cheapest allocation whose foretold KL is a share of what the budget allows. The KL of every one is measured
on calibration text and re-scales the sums of risks that foretell the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..plans.limits import Gates
from ..policy.knapsack import Array
from .layers import Measurement
from .search import LEAST_KL, Joint, Losses, Way, joint, way_within

SHARES = (0.05, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9)
"""Shares of the KL that the budget allows, for which plans are sought."""
TAMED = 4
"""Most plans that are measured for one share: one that loses needles is followed by one with less risk for them."""
REHEARSED = 0.2
"""Significance level of the sign test on needles lost in calibration text: a margin to that of the proof."""
CLOSER = (0.25, 0.5)
"""A plan that loses needles is followed by one with at least and at most so much of its risk for retrieval."""

NOTED = ("flips", "kl_p999", "delta_nll", "needles")
"""What is reported of a candidate at each length, beside its KL."""
CHEAPER = 0.995
"""A bolder candidate costs at most this share of the one before: what one head saves in a small model."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan that held-out text may judge, with its cache, and by length its loss on calibration text."""

    way: Way
    joint: Mapping[int, Joint]
    predicted: Mapping[int, float]  # its re-scaled risk before it was measured, with the loss of the cache's format
    alpha: Array  # `[lengths]`, re-scales sums of risks to what was measured
    budget: float | None = None  # the one that it was proven for, None if it is new

    @classmethod
    def measured(cls, measurement: Measurement, way: Way, alpha: Array, budget: float | None = None) -> Candidate:
        """Returns the candidate of a way, measured on calibration text; `alpha` is that of the one before."""
        lengths, picks, risk = measurement.inputs.settings.lengths, way.allocation.picks, way.allocation.risk
        losses, format_loss = {length: joint(measurement, picks, length) for length in lengths}, way.beside or {}
        foretold = dict(zip(lengths, (risk * alpha).tolist(), strict=True))
        visible = np.array([losses[length].visible for length in lengths])
        # without any risk there is nothing to re-scale
        scaled = np.divide(visible, risk, out=np.array(alpha), where=risk > 0.0)
        return cls(way, losses, {n: kl + format_loss.get(n, 0.0) for n, kl in foretold.items()}, scaled, budget)

    def added(self, length: int) -> float:
        """Returns the KL that plan and format add to that of rounding, nats/token."""
        return self.joint[length].added + (self.way.beside or {}).get(length, 0.0)

    def forgets(self, gates: Gates) -> list[int]:
        """Returns the lengths at which it loses too many needles in calibration text."""
        return [length for length, one in self.joint.items() if gates.forgets(*one.needles, REHEARSED)]


def ladder(
    measurement: Measurement, formats: Losses, gates: Gates, stock_flips: float, log: list[dict[str, Any]]
) -> tuple[list[Candidate], Gates, bool]:
    """Returns the candidates from safe to bold, their limits, and whether some were left out for lost needles.

    Each is cheaper than those before. `formats` are those of a smaller cache, where one is wanted; `stock_flips` as in
    `judged`. What was measured joins the log.
    """
    inputs, s = measurement.inputs, measurement.inputs.settings
    alpha, needles, flips, measured = np.ones(len(s.lengths)), dict[int, float](), 0.0, list[Candidate]()
    # the first share twice: what it teaches of the sums of risks places all others
    for step, share in enumerate((SHARES[0], *SHARES)):
        inputs.run.progress("joint", step, len(SHARES) + 1)
        for _ in range(TAMED):
            inputs.refuse_late()
            limit = np.full(len(s.lengths), share * _room(gates, flips))
            way = way_within(measurement, formats, limit, alpha, needles)
            if way is None or any(way.same(one.way) for one in measured):
                break
            one = Candidate.measured(measurement, way, alpha)
            measured.append(one)
            losses = [*one.joint.values()]
            log.append(
                {
                    "share": share,
                    "cost": one.way.cost,
                    "stored": one.way.stored,
                    "predicted": [*one.predicted.values()],
                    "measured": [one.added(length) for length in one.joint],
                    **{name: [getattr(loss, name) for loss in losses] for name in NOTED},
                }
            )
            alpha = one.alpha
            flips = max([flips, *(loss.flips / math.sqrt(loss.kl) for loss in losses if loss.kl > 0.0)])
            if not (lost := one.forgets(gates)):
                break
            for length in lost:
                gone, won, by_exact = one.joint[length].needles
                closer = one.joint[length].risk * float(np.clip(gates.spared(by_exact) / (gone - won), *CLOSER))
                needles[length] = min(closer, needles.get(length, math.inf))
    inputs.run.progress("joint", len(SHARES) + 1, len(SHARES) + 1)
    if flips:
        gates = gates.with_flips(flips, stock_flips)
    room = _room(gates, flips)
    used = {one: max(map(one.added, s.lengths)) / room for one in measured}
    enough = [one for one in measured if s.kv_bytes is None or one.way.cost <= s.kv_bytes]
    kept = sorted((one for one in enough if used[one] <= 1.0 and not one.forgets(gates)), key=used.__getitem__)
    forgetful = any(used[one] <= 1.0 and one.forgets(gates) for one in measured)
    # a share of the bytes that is asked for is reached by the safest, and less is not asked for
    return falling(kept if s.kv_bytes is None else kept[:1]), gates, forgetful


def falling(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Returns those that cost clearly less than each one before them, in the order given."""
    kept: list[Candidate] = []
    for one in candidates:
        if not kept or one.way.cost < CHEAPER * kept[-1].way.cost:
            kept.append(one)
    return kept


def _room(gates: Gates, flips: float) -> float:
    """The KL that a plan may add to that of rounding, nats/token; flips are per square root of the KL, 0 if unknown."""
    room = gates.most_kl - gates.rounding
    if flips > 0.0:
        room = min(room, ((1.0 - gates.least_top1) / flips) ** 2 - gates.rounding)
    return max(room, LEAST_KL)
