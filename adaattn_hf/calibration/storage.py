"""What a model's cache may store inside the loss budget: a format for the whole model, proved as decoding reads it.

The windows of a plan cost nothing more in a cache that keeps them alone (streaming heads): their loss is the plan's.
What a format rounds is measured by a tap that stores every sequence and answers each row over the codes, as decoding
over the cache does, before any plan is sought: what is left of the budget is the windows', and the format is the one
beside which the cache becomes smallest. Plan and format are then proved together (`campaign`). It is one format for the
whole model: how much a head keeps is the plan's to say, head by head, and heads of another format would be read by a
call of their own in every layer and step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..attention.stored import CHANNELS, FORMATS
from ..plans.choices import EXACT
from ..plans.plan import Verified
from ..plans.program import Program
from ..policy.acceptance import Gates
from ..policy.knapsack import Array
from .over_codes import stored_tap
from .proof import Test, prove
from .search import Joint, JointPasses, programs, solve

if TYPE_CHECKING:
    from .measure import Measurement

PROTOCOL = "cache"
"""Where a plan's protocol says what its cache stores."""


@dataclass(frozen=True)
class Storage:
    """A way to keep keys and values.

    Attributes:
        stored: `model`, or one of `attention.stored.FORMATS`.
        streaming: Whether heads with a window keep it alone.
        share: Bytes at the longest length, as a share of a cache of all tokens in the model's dtype.
    """

    stored: str
    streaming: bool
    share: float

    @property
    def words(self) -> str:
        """In words."""
        return f"{self.stored}{' with streaming heads' * self.streaming} ({self.share:.2f}x of the bytes)"


def storages(measurement: Measurement, by_layer: Mapping[int, Program]) -> list[Storage]:
    """Returns the ways to keep the cache of a plan, the fewest bytes first.

    Args:
        measurement: Of the model.
        by_layer: The plan's programs by layer index.
    """
    layers, length = measurement.layers, max(measurement.inputs.settings.lengths)
    tokens, every = layers.kept_tokens(length), layers.candidates.choices
    whole, kept = tokens[:, 0].sum(), 0
    for unit, (layer, head) in enumerate(layers.units):
        choice = by_layer[layer].plan.choices[head] if layer in by_layer else EXACT
        kept += tokens[unit, every.index(choice)]
    call = layers.calls[length]
    dim, dim_v = call.key.shape[3], call.value.shape[3]
    bytes_of = {
        "model": (dim + dim_v) * call.key.element_size(),
        "int8": dim + dim_v + 2,
        "k8v4": dim + dim_v // 2 + 2,
    }
    formats = [name for name in ("model", *FORMATS) if name != "k8v4" or dim_v % CHANNELS == 0]
    found = [
        Storage(name, bool(kept < whole), float(kept / whole) * bytes_of[name] / bytes_of["model"])
        for name in formats
    ]
    return sorted(found, key=lambda one: one.share)


@dataclass(frozen=True)
class Rounding:
    """What a format costs the model without a plan, on the calibration text that plans are compared on.

    Attributes:
        stored: The format.
        joint: The cost by length.
    """

    stored: str
    joint: Mapping[int, Joint]

    @property
    def kl(self) -> dict[int, float]:
        """KL by length, nats/token."""
        return {length: joint.kl for length, joint in self.joint.items()}


def roundings(passes: JointPasses) -> list[Rounding]:
    """Returns what every format costs that the model's keys and values fit into."""
    measurement = passes.measurement
    none = np.zeros(len(measurement.layers.units), dtype=np.int64)
    names = [one.stored for one in storages(measurement, {}) if one.stored != "model"]
    lengths = measurement.inputs.settings.lengths
    return [
        Rounding(name, {length: passes.joint(none, length, name) for length in lengths}) for name in names
    ]


def aimed_at(measurement: Measurement, found: Sequence[Rounding], afforded: Array) -> Rounding | None:
    """Returns the format of the smallest cache by the sums of risks, None where numbers are as small.

    Where a share of the bytes is asked for: the most precise among those that reach it.

    Args:
        measurement: Of the model.
        found: What the formats cost.
        afforded: `[lengths]`, KL that a plan and the format may cost together, nats/token.
    """
    s = measurement.inputs.settings
    ways: list[tuple[float, Rounding | None]] = []
    for rounding in [*found, None]:  # the coarsest first, numbers last
        left = afforded - np.array([0.0 if rounding is None else rounding.kl[n] for n in s.lengths])
        if (left >= 0.0).all():
            every = storages(measurement, programs(measurement, solve(measurement, left).picks))
            stored = "model" if rounding is None else rounding.stored
            ways.append((next(one.share for one in every if one.stored == stored), rounding))
    enough = [way for way in ways if s.kv_bytes is not None and way[0] <= s.kv_bytes]
    return enough[-1][1] if enough else min(ways, key=lambda way: way[0])[1]


def choose_storage(
    measurement: Measurement,
    by_layer: Mapping[int, Program],
    gates: Gates,
    level: float,
    used: int,
    known: Mapping[str, Verified | str] | None = None,
) -> tuple[dict[str, Any] | None, str]:
    """Returns what a plan's protocol says of its cache, None where nothing was proved, and the outcome in words.

    The fewest bytes come first, or where a share of the bytes is asked for, the most precise among those that reach it.
    Formats of which nothing is known are tested on held-out text that no plan has seen, and share the level.

    Args:
        measurement: Of the model.
        by_layer: The plan's programs by layer index.
        gates: What must hold.
        level: Error rate of all tests together.
        used: Held-out sequences that plans have seen.
        known: Formats that were proved with the plan, and of others why they are not looked at.
    """
    inputs = measurement.inputs
    s = inputs.settings
    every = storages(measurement, by_layer)
    asked = every
    if s.kv_bytes is not None:
        asked = [one for one in reversed(every) if one.share <= s.kv_bytes]
        if not asked:
            return None, (
                f"kv_bytes: {s.kv_bytes:g}x of the bytes is not reached by any format with this plan's windows, the "
                f"smallest is {every[0].words}; ask for that, for a larger budget, or for longer --lengths"
            )
    shards = {length: inputs.samples[length].held_out[used : used + s.most_held_out] for length in s.lengths}
    heads = dict.fromkeys(measurement.layers.indices, measurement.layers.kv_heads)
    lost: list[str] = []
    for number, storage in enumerate(asked, 1):
        if storage.stored == "model":
            if not storage.streaming:
                break  # a cache of numbers of all tokens is what there is anyway
            words = "; ".join([f"cache: {storage.words}, as exact as the plan", *lost])
            return {**asdict(storage), "verified": None}, words
        verdict = (known or {}).get(storage.stored)
        if isinstance(verdict, str):
            lost.append(f"{storage.words}: {verdict}")
            continue
        if verdict is not None:
            words = f"cache: {storage.words} {verdict.sentence}"
            return {**asdict(storage), "verified": asdict(verdict)}, words
        if min(len(shard) for shard in shards.values()) < 2:
            lost.append(f"{storage.words} is not proved, since the held-out text is used up: give more of it")
            continue
        proof = prove(
            inputs,
            by_layer,
            heads,
            shards,
            Test(gates, level / len(asked), number, dict.fromkeys(s.lengths, 0.0)),
            stored_tap(by_layer, storage.stored),
        )
        worst = proof.worst
        if proof.passed:
            return {**asdict(storage), "verified": asdict(worst)}, f"cache: {storage.words} {worst.sentence}"
        lost.append(f"{storage.words} {worst.sentence}")
    target = "" if s.kv_bytes is None else f" that takes {s.kv_bytes:g}x of the bytes"
    reasons = "; ".join(lost) or "none is smaller"
    return None, f"cache: the budget of {s.budget:.3g} nats/token allows no format{target}: {reasons}"
