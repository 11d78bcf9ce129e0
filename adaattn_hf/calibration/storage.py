"""What a model's cache may store inside the loss budget: a format for the whole model, proved as decoding reads it.

The windows of a plan cost nothing more in a cache that keeps them alone (streaming heads): their loss is the plan's.
What a format rounds is measured by a tap that stores every sequence and answers each row over the codes, as decoding
over the cache does, and is proved on held-out text that nothing was learned from, by the gates of the plan. It is one
format for the whole model: how much a head keeps is the plan's to say, head by head, and heads of another format would
be read by a call of their own in every layer and step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..attention.stored import CHANNELS, FORMATS
from ..plans.choices import EXACT, Choice
from ..plans.program import Program
from ..policy.acceptance import Gates
from .over_codes import stored_tap
from .proof import Test, prove

if TYPE_CHECKING:
    from .measure import Measurement

__all__ = ["PROTOCOL", "Storage", "choose_storage", "kept_tokens"]

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


def kept_tokens(choice: Choice, own: int | None, length: int) -> int:
    """Returns how many tokens of a sequence a streaming head keeps; `own` is the window of the layer itself."""
    most = length if own is None else min(length, own - 1)
    # layers with a window of their own keep that, whatever the plan says
    return most if choice.span is None or own is not None else min(most, sum(choice.span))


def storages(measurement: Measurement, programs: Mapping[int, Program]) -> list[Storage]:
    """Returns the ways to keep the cache of a plan, the fewest bytes first.

    Args:
        measurement: Of the model.
        programs: The plan's programs by layer index.
    """
    layers, length = measurement.layers, max(measurement.inputs.settings.lengths)
    kept = whole = 0
    for index in layers.indices:
        own, program = layers.windows[index], programs.get(index)
        choices = [EXACT] * layers.kv_heads if program is None else program.plan.choices
        kept += sum(kept_tokens(choice, own, length) for choice in choices)
        whole += kept_tokens(EXACT, own, length) * layers.kv_heads
    call = layers.calls[length]
    dim, dim_v = call.key.shape[3], call.value.shape[3]
    bytes_of = {
        "model": (dim + dim_v) * call.key.element_size(),
        "int8": dim + dim_v + 2,
        "k8v4": dim + dim_v // 2 + 2,
    }
    formats = [name for name in ("model", *FORMATS) if name != "k8v4" or dim_v % CHANNELS == 0]
    if any(choice.over_stored() is None for program in programs.values() for choice in program.plan.choices):
        formats = ["model"]
    found = [
        Storage(name, kept < whole, kept / whole * bytes_of[name] / bytes_of["model"]) for name in formats
    ]
    return sorted(found, key=lambda one: one.share)


def choose_storage(
    measurement: Measurement, programs: Mapping[int, Program], gates: Gates, level: float, used: int
) -> tuple[dict[str, Any] | None, str]:
    """Returns what a plan's protocol says of its cache, None where nothing was proved, and the outcome in words.

    Formats are tested on held-out text that no plan has seen, the fewest bytes first, or where a share of the bytes is
    asked for, the most precise first among those that reach it; the level is divided among them.

    Args:
        measurement: Of the model.
        programs: The plan's programs by layer index.
        gates: What must hold.
        level: Error rate of all tests together.
        used: Held-out sequences that plans have seen.
    """
    inputs = measurement.inputs
    s = inputs.settings
    every = storages(measurement, programs)
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
        if min(len(shard) for shard in shards.values()) < 2:
            lost.append(f"{storage.words} is not proved, since the held-out text is used up: give more of it")
            continue
        proof = prove(
            inputs,
            programs,
            heads,
            shards,
            Test(gates, level / len(asked), number, dict.fromkeys(s.lengths, 0.0)),
            stored_tap(programs, storage.stored),
        )
        worst = proof.worst
        if proof.passed:
            return {**asdict(storage), "verified": asdict(worst)}, f"cache: {storage.words} {worst.sentence}"
        lost.append(f"{storage.words} {worst.sentence}")
    target = "" if s.kv_bytes is None else f" that takes {s.kv_bytes:g}x of the bytes"
    reasons = "; ".join(lost) or "none is smaller"
    return None, f"cache: the budget of {s.budget:.3g} nats/token allows no format{target}: {reasons}"
