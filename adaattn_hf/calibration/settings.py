"""The settings of a calibration, and its result."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from ..plans.plan import Plan
from ..policy.candidates import FAMILIES, WINDOWS

_OF_THE_PROOF = (
    "budget", "held_out", "most_held_out", "tries", "bolder", "haystacks", "needles", "top1", "kl_p999",
    "needles_lost", "alpha", "minutes", "rounds", "optimize", "kv_bytes", "batch", "captured",
)  # fmt: skip
"""Settings that do not affect the measurement of risks."""


OPTIMIZED = ("time", "memory")


@dataclass(frozen=True)
class CalibrationSettings:
    """Settings of a calibration.

    Attributes:
        budget: Allowed loss, nats/token; ln(1 + b) for a relative rise b of the perplexity.
        lengths: Length bins in tokens, rising; tokens that see more keys than the last one are exact.
        seed: Seed of the text sample, the labels, the rows and the needles.
        sequences: Sequences per length for measuring risks.
        rows: Query rows sampled per sequence.
        labels: Label draws, one backward pass each.
        joint: Sequences per length for measuring whole plans, which re-scales the risks.
        held_out: Held-out sequences per length at the first look at a plan.
        most_held_out: Held-out sequences per length at the last look, if earlier looks do not decide.
        tries: Plans that may fail before the result is the exact plan; they share `alpha`.
        bolder: Bolder plans that may follow one that passed with room.
        haystacks: Held-out sequences per length that also carry needles.
        needles: Needles per haystack, fewer where a length holds fewer.
        top1: Smallest share of tokens with the same likeliest token; 0 for a limit derived from the budget.
        kl_p999: Largest 99.9th percentile of the KL of a token, nats; `None` for no limit.
        needles_lost: Share of the needles that may be lost; `None` for 2 %, or more if that may be chance.
        families: Kinds of choices to consider; see `policy.candidates.FAMILIES`.
        windows: Windows to consider.
        decode_tokens: Decode steps per prefill, the weight of decode in the price.
        batch: Sequences that prices and whole passes are timed with at once.
        captured: Whether decode steps will run in captured CUDA graphs, as compiled generation does: the device's time
            alone is their price then, with nothing of the host's.
        alpha: Significance level of the tests of all plans together.
        minutes: Minutes after which no further plan is tried; `None` for no limit.
        rounds: Rounds in which whole forward passes are timed after a plan has passed; 0 for none.
        optimize: `time`; or `memory`, which looks for the smallest cache, by windows alone, see `storage`.
        kv_bytes: Largest size of the cache, as a share of a cache of all tokens in the model's dtype.
    """

    budget: float = 9.995003330835334e-04
    lengths: tuple[int, ...] = (4096,)
    seed: int = 0
    sequences: int = 4
    rows: int = 256
    labels: int = 2
    joint: int = 3
    held_out: int = 12
    most_held_out: int = 36
    tries: int = 3
    bolder: int = 2
    haystacks: int = 4
    needles: int = 16
    top1: float = 0.0
    kl_p999: float | None = None
    needles_lost: float | None = None
    families: tuple[str, ...] = FAMILIES
    windows: tuple[int, ...] = WINDOWS
    decode_tokens: int = 64
    batch: int = 1
    captured: bool = False
    alpha: float = 0.05
    minutes: float | None = None
    rounds: int = 4
    optimize: str = "time"
    kv_bytes: float | None = None

    def __post_init__(self) -> None:
        counted = ("sequences", "rows", "labels", "joint", "tries", "needles", "batch")
        lengths, kv_bytes, tail, lost = self.lengths, self.kv_bytes, self.kl_p999, self.needles_lost
        rising = bool(lengths) and list(lengths) == sorted(set(lengths)) and lengths[0] >= 32
        keeps_less = not self.with_cache or "window" in self.families
        # name, whether its value is allowed, what is expected, and how the value is told if not by itself
        for name, allowed, expected, *told in (
            ("budget", 0.0 < self.budget < math.inf, "a loss above 0 nats/token; no budget needs no plan"),
            ("lengths", rising, "rising numbers of at least 32 tokens", list(lengths)),
            *((name, getattr(self, name) >= 1, "at least 1") for name in counted),
            ("decode_tokens", self.decode_tokens >= 0, "at least 0"),
            ("rounds", self.rounds >= 0 and self.rounds != 1, "at least 2, or 0 for no timing"),
            ("optimize", self.optimize in OPTIMIZED, f"one of {', '.join(OPTIMIZED)}", repr(self.optimize)),
            ("kv_bytes", kv_bytes is None or 0.0 < kv_bytes < 1.0,
             "a share of the bytes below 1, such as 0.4x"),
            ("families", keeps_less,
             "window among them: only heads with windows keep less in a cache, so add it, or leave optimize and "
             "kv_bytes out", ",".join(self.families)),
            ("minutes", self.minutes is None or self.minutes > 0.0, "a time above 0, or None for no end"),
            ("bolder", self.bolder >= 0, "a number of plans, 0 for none"),
            ("most_held_out", self.most_held_out >= self.held_out,
             f"at least the {self.held_out} sequences of held_out"),
            ("top1", 0.0 <= self.top1 < 1.0, "a share of the tokens below 1, such as 0.99"),
            ("kl_p999", tail is None or tail > 0.0, "a KL above 0 nats, or None for no limit"),
            ("needles_lost", lost is None or 0.0 <= lost < 1.0, "a share below 1, such as 0.02"),
            ("alpha", 0.0 < self.alpha < 1.0, "an error rate between 0 and 1, such as 0.05"),
            ("held_out", self.held_out >= 2, "at least 2: one sequence has no spread"),
        ):  # fmt: skip
            if not allowed:
                value = told[0] if told else getattr(self, str(name))
                raise ValueError(f"{name} is {value}, expected {expected}")

    @property
    def with_cache(self) -> bool:
        """Whether a smaller cache is wanted."""
        return self.kv_bytes is not None or self.optimize == "memory"

    def measured(self) -> dict[str, Any]:
        """Returns the settings that risks depend on; one measurement serves all budgets and ways of verification."""
        words = asdict(self)
        for name in _OF_THE_PROOF:
            del words[name]
        if self.with_cache:
            words["memory"] = True
        return words


@dataclass(eq=False)
class Calibration:
    """The result of a calibration.

    Attributes:
        plan: The plan: verified, or exact if none passed.
        tensors: Bases and means that the plan needs, by name.
        met: Whether an approximating plan passed.
        sentence: The outcome in words.
        report: Everything measured, for a report.
    """

    plan: Plan
    tensors: dict[str, Tensor]
    met: bool
    sentence: str
    report: dict[str, Any] = field(default_factory=dict)
