"""Fixes the candidates of a budget, from safe to bold, on calibration text: before a word of held-out text is read.

Each is the cheapest allocation whose foretold KL is a share of what the budget allows. The KL of every one is measured
and re-scales the sums of risks that foretell the next.

Streaming heads, which keep only the window of the plan, lose no more than the plan itself. The loss of a quantised
format is measured by computing every row over quantised keys and values as decoding does, and what it leaves of a limit
is for windows. There is one format for the whole model: heads in another format would need a call of their own in
every layer and step.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from adaattn_hf.eval.arms import stored_tap
from adaattn_hf.eval.needles import compared
from adaattn_hf.patches.cache.formats import FORMATS

from ..attention.stored import CHANNELS
from ..plans.limits import Gates
from ..policy.knapsack import Allocation, Array
from .layers import Measurement, Picks, bound_layers, make_plan, steps_stay_exact

PROTOCOL = "cache"
"""Key of the cache's format in a plan's protocol."""
Losses = Mapping[str, Mapping[int, float]]
"""By format of a cache, the KL that it adds by length, nats/token."""
LEAST_KL = 1e-9
"""Smallest KL that is aimed at, nats/token."""
VISIBLE = 0.1
"""Share of the KL of rounding that a plan must add to be distinguished from exact attention."""
SHARES = (0.05, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9)
"""Shares of the KL that the budget allows, for which plans are sought."""
MOST_TRIES = 4
"""Most plans that are measured for one share: one that loses needles is followed by one with less risk for them."""
REHEARSED = 0.2
"""Significance level of the sign test on needles lost in calibration text: a margin to that of the proof."""
CLOSER = (0.25, 0.5)
"""A plan that loses needles is followed by one with at least and at most so much of its risk for retrieval."""
NOTED = ("flips", "kl_p999", "delta_nll", "needles")
"""What is reported of a candidate at each length, beside its KL."""
CHEAPER = 0.995
"""A bolder candidate costs at most this share of the one before: what one head saves in a small model."""


def solve(measurement: Measurement, limit: Array, needles: Mapping[int, float] | None = None) -> Allocation:
    """Returns the cheapest allocation within a limit on risks per length; `needles` limits those for retrieval."""
    more = [(measurement.state.needles[length], most) for length, most in (needles or {}).items()]
    return measurement.solver().solve(limit, measurement.inputs.settings.with_cache, more)


@dataclass(frozen=True)
class Joint:
    """The measured loss of a whole plan on calibration text, KL and loss in nats/token."""

    kl: float  # the mean, with that of rounding
    flips: float  # share of tokens whose likeliest token changes
    kl_p999: float  # 99.9th percentile over tokens
    delta_nll: float
    rounding: float = 0.0  # mean KL of two exact implementations
    needles: tuple[int, int, int] = (0, 0, 0)  # lost by the plan, found by it alone, found by exact attention
    risk: float = 0.0  # the plan's, for retrieval

    @property
    def added(self) -> float:
        """What the plan adds to the KL of rounding, nats/token."""
        return max(self.kl - self.rounding, LEAST_KL)

    @property
    def visible(self) -> float:
        """The same, but at least what can be distinguished from rounding: risks are re-scaled by it, so it is not 0."""
        return max(self.added, VISIBLE * self.rounding)


def joint(measurement: Measurement, picks: Picks, length: int, stored: str = "model") -> Joint:
    """Returns the loss of an allocation on calibration text, over a cache of the format `stored`."""
    inputs, s = measurement.inputs, measurement.inputs.settings
    sequences = inputs.samples[length]["joint"]
    # a plan's needles here are others than in the proof, whose text is other text
    hidden = sequences[: s.haystacks] if inputs.scoring.generates and picks.any() else []
    haystacks = [inputs.haystack(one, torch.Generator().manual_seed(s.seed)) for one in hidden]
    tap = stored_tap(bound_layers(measurement, make_plan(measurement, picks)), stored)
    scores, needles = inputs.score(tap, sequences, haystacks)
    return Joint(
        kl=float(np.mean([one.kl.mean() for one in scores])),
        flips=1.0 - float(np.mean([one.agree.mean() for one in scores])),
        kl_p999=float(np.quantile(np.concatenate([one.kl[0] for one in scores]), 0.999)),
        delta_nll=float(np.mean([one.delta.mean() for one in scores])),
        rounding=measurement.rounding,
        needles=compared(needles),
        risk=float(measurement.state.needles[length][np.arange(len(picks)), picks].sum()),
    )


@dataclass(frozen=True)
class Storage:
    """A way to keep keys and values: `model` or a stored format, and whether heads with a window keep that alone.

    `share` is of the bytes of a cache of all tokens in the model's dtype, at the longest length.
    """

    stored: str
    streaming: bool
    share: float

    @property
    def words(self) -> str:
        """In words."""
        return f"{self.stored}{' with streaming heads' * self.streaming} ({self.share:.2f}x of the bytes)"


def storages(measurement: Measurement, picks: Picks) -> dict[str, Storage]:
    """Returns the ways to store the cache of an allocation, by format."""
    tokens = measurement.kept_tokens
    whole, kept = tokens[:, 0].sum(), tokens[np.arange(len(picks)), picks].sum()
    call = measurement.layers.calls[None][max(measurement.inputs.settings.lengths)]
    dim, dim_v = call.key.shape[3], call.value.shape[3]
    bytes_of = {name: one.token_bytes(dim, dim_v, call.key.dtype) for name, one in FORMATS.items()}
    return {
        name: Storage(name, bool(kept < whole), float(kept / whole) * size / bytes_of["model"])
        for name, size in bytes_of.items()
        if name != "k8v4" or dim_v % CHANNELS == 0
    }


def roundings(measurement: Measurement) -> Losses:
    """Returns what every format that supports the head size loses without a plan, the smallest first."""
    lengths = measurement.inputs.settings.lengths
    none = np.zeros(len(measurement.layers.units), dtype=np.int64)
    names = sorted(storages(measurement, none).values(), key=lambda one: one.share)
    return {
        one.stored: {length: joint(measurement, none, length, one.stored).added for length in lengths}
        for one in names
        if one.stored != "model"
    }


@dataclass(frozen=True, eq=False)
class Way:
    """An allocation with the way to keep its cache, None where a cache of all tokens is not asked to be smaller.

    `beside` is by length the KL that the cache's format adds, nats/token; empty without one.
    """

    allocation: Allocation
    storage: Storage | None = None
    beside: Mapping[int, float] | None = None

    @property
    def cost(self) -> float:
        """What is to be small: seconds, or the share of the cache's bytes."""
        return self.allocation.price if self.storage is None else self.storage.share

    @property
    def stored(self) -> str:
        """The cache's format."""
        return "model" if self.storage is None else self.storage.stored

    def same(self, other: Self) -> bool:
        """Whether another way makes the same of every head and of the cache."""
        return self.stored == other.stored and np.array_equal(self.allocation.picks, other.allocation.picks)


def way_within(
    measurement: Measurement, formats: Losses, limit: Array, alpha: Array, needles: Mapping[int, float]
) -> Way | None:
    """Returns the way of least cost whose foretold KL is within a `limit` `[lengths]`, nats/token, None if none saves.

    Sums of risks are re-scaled by `alpha` `[lengths]`. Of the cache it is the smallest; with `kv_bytes` that of the
    most precise format that is small enough.
    """
    s = measurement.inputs.settings
    if not s.with_cache:
        allocation = solve(measurement, limit / alpha, needles)
        slow = s.aim == "step" and steps_stay_exact(measurement.table, measurement.layers, s.lengths, allocation.picks)
        return Way(allocation) if allocation.picks.any() and not slow else None
    ways: list[Way] = []
    stores: Losses = {**formats, "model": {}}  # the coarsest first, numbers last
    for stored, losses in stores.items():
        left = limit - np.array([losses.get(length, 0.0) for length in s.lengths])
        if (left >= 0.0).all():
            allocation = solve(measurement, np.maximum(left, LEAST_KL) / alpha, needles)
            ways.append(Way(allocation, storages(measurement, allocation.picks)[stored], losses))
    enough = [way for way in ways if s.kv_bytes is not None and way.cost <= s.kv_bytes]
    best = enough[-1] if enough else min(ways, key=lambda way: way.cost)
    return best if best.cost < 1.0 else None


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan that held-out text may judge, with its cache, and by length its loss on calibration text."""

    way: Way
    joint: Mapping[int, Joint]
    predicted: Mapping[int, float]  # its re-scaled risk before it was measured, with the loss of the cache's format
    alpha: Array  # `[lengths]`, re-scales sums of risks to what was measured
    budget: float | None = None  # the one that it was proven for, None if it is new

    @classmethod
    def measured(cls, measurement: Measurement, way: Way, alpha: Array, budget: float | None = None) -> Self:
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
        for _ in range(MOST_TRIES):
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
