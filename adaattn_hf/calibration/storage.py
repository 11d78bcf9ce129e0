"""Chooses and verifies the format of a model's key/value cache within the loss budget.

Streaming heads, which keep only the window of the plan, lose no more than the plan itself. The loss of a quantised
format is measured before the search for a plan, by computing every row over quantised keys and values as decoding
does. The rest of the budget is left for windows, and the format that then gives the smallest cache is chosen. Plan
and format are verified together (`calibrate`). There is one format for the whole model: heads in another format would
need a call of their own in every layer and step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..attention.stored import CHANNELS, FORMATS
from ..plans.limits import Gates
from ..plans.plan import Verified
from ..plans.wording import allowed
from ..policy.knapsack import Array
from .inputs import OutOfTime
from .layers import Measurement, Picks
from .proof import Test, prove
from .search import Joint, JointPasses, solve

PROTOCOL = "cache"
"""Key of the cache's format in a plan's protocol."""


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


def storages(measurement: Measurement, picks: Picks) -> list[Storage]:
    """Returns the ways to store the cache of an allocation, the smallest first."""
    tokens = measurement.kept_tokens
    whole, kept = tokens[:, 0].sum(), tokens[np.arange(len(picks)), picks].sum()
    call = measurement.layers.calls[None][max(measurement.inputs.settings.lengths)]
    dim, dim_v = call.key.shape[3], call.value.shape[3]
    bytes_of = {"model": (dim + dim_v) * call.key.element_size(), "int8": dim + dim_v + 2, "k8v4": dim + dim_v // 2 + 2}
    formats = [name for name in ("model", *FORMATS) if name != "k8v4" or dim_v % CHANNELS == 0]
    found = [
        Storage(name, bool(kept < whole), float(kept / whole) * bytes_of[name] / bytes_of["model"]) for name in formats
    ]
    return sorted(found, key=lambda one: one.share)


@dataclass(frozen=True)
class Rounding:
    """The loss of a cache format without a plan, by length, on the text that whole plans are measured on."""

    stored: str
    joint: Mapping[int, Joint]

    @property
    def kl(self) -> dict[int, float]:
        """KL by length, nats/token."""
        return {length: joint.added for length, joint in self.joint.items()}


def roundings(passes: JointPasses) -> list[Rounding]:
    """Returns the loss of every format that supports the model's head size."""
    measurement = passes.measurement
    none = np.zeros(len(measurement.layers.units), dtype=np.int64)
    names = [one.stored for one in storages(measurement, none) if one.stored != "model"]
    lengths = measurement.inputs.settings.lengths
    return [Rounding(name, {length: passes.joint(none, length, name) for length in lengths}) for name in names]


def aimed_at(measurement: Measurement, found: Sequence[Rounding], afforded: Array) -> Rounding | None:
    """Returns the format with the smallest predicted cache, None if unquantised numbers give one as small.

    With `kv_bytes` it is the most precise format that is small enough. Plan and format may together have a KL of
    `afforded` `[lengths]`, nats/token.
    """
    s = measurement.inputs.settings
    ways: list[tuple[float, Rounding | None]] = []
    for rounding in [*found, None]:  # the coarsest first, numbers last
        left = afforded - np.array([0.0 if rounding is None else rounding.kl[n] for n in s.lengths])
        if (left >= 0.0).all():
            every = storages(measurement, solve(measurement, left).picks)
            stored = "model" if rounding is None else rounding.stored
            ways.append((next(one.share for one in every if one.stored == stored), rounding))
    enough = [way for way in ways if s.kv_bytes is not None and way[0] <= s.kv_bytes]
    return enough[-1][1] if enough else min(ways, key=lambda way: way[0])[1]


def choose_storage(
    measurement: Measurement, picks: Picks, gates: Gates, level: float, used: int, known: Mapping[str, Verified | str]
) -> tuple[dict[str, Any] | None, str]:
    """Returns the protocol's entry on the cache, None if no format was verified, and the outcome in words.

    Formats are tried from the smallest on, or with `kv_bytes` from the most precise one that is small enough. Those
    without a verdict or a reason in `known` are tested on held-out text beyond the `used`, at the `level` together.
    """
    inputs = measurement.inputs
    s = inputs.settings
    every = storages(measurement, picks)
    asked = every
    if s.kv_bytes is not None:
        asked = [one for one in reversed(every) if one.share <= s.kv_bytes]
        if not asked:
            return None, (
                f"kv_bytes: {s.kv_bytes:g}x of the bytes is not reached by any format with this plan's windows, the "
                f"smallest is {every[0].words}; ask for that, for a larger budget, or for longer --lengths"
            )
    shards = {length: inputs.samples[length].held_out[used : used + s.most_held_out] for length in s.lengths}
    lost: list[str] = []
    for number, storage in enumerate(asked, 1):
        if storage.stored == "model":
            if not storage.streaming:
                break  # a cache of numbers of all tokens is what there is anyway
            words = "; ".join([f"cache: {storage.words}, as exact as the plan", *lost])
            return {**asdict(storage), "verified": None}, words
        verdict = known.get(storage.stored)
        if verdict is None:
            if min(len(shard) for shard in shards.values()) < 2 * inputs.sources:
                lost.append(f"{storage.words} is not verified, since the held-out text is used up: give more of it")
                continue
            predicted = dict.fromkeys(s.lengths, 0.0)
            test = Test(gates, level / len(asked), number, predicted, storage.stored)
            try:
                verdict = prove(measurement, picks, shards, test).worst
            except OutOfTime as error:
                lost.append(f"{storage.words} is not verified: {error}")
                continue
        if isinstance(verdict, str):
            lost.append(f"{storage.words}: {verdict}")
            continue
        words = f"{storage.words} {verdict.sentence}"
        if verdict.passed:
            return {**asdict(storage), "verified": asdict(verdict)}, f"cache: {words}"
        lost.append(words)
    target = "" if s.kv_bytes is None else f" that takes {s.kv_bytes:g}x of the bytes"
    reasons = "; ".join(lost) or "none is smaller"
    return None, f"cache: the budget of {allowed(s.budget)} allows no format{target}: {reasons}"
