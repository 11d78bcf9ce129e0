"""Solves the knapsack within a limit on risks, and measures whole plans on calibration text, with ways to keep a cache.

Streaming heads, which keep only the window of the plan, lose no more than the plan itself. The loss of a quantised
format is measured by computing every row over quantised keys and values as decoding does, and what it leaves of a limit
is for windows. There is one format for the whole model: heads in another format would need a call of their own in
every layer and step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from adaattn_hf.eval.arms import stored_tap
from adaattn_hf.eval.needles import compared
from adaattn_hf.patches.cache.formats import FORMATS

from ..attention.stored import CHANNELS
from ..policy.knapsack import Allocation, Array
from .layers import Measurement, Picks, bound_layers, steps_stay_exact

PROTOCOL = "cache"
"""Key of the cache's format in a plan's protocol."""
Losses = Mapping[str, Mapping[int, float]]
"""By format of a cache, the KL that it adds by length, nats/token."""
LEAST_KL = 1e-9
"""Smallest KL that is aimed at, nats/token."""
VISIBLE = 0.1
"""Share of the KL of rounding that a plan must add to be distinguished from exact attention."""


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
    scores, needles = inputs.score(stored_tap(bound_layers(measurement, picks), stored), sequences, haystacks)
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

    def same(self, other: Way) -> bool:
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
