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
        if not 0.0 < self.budget < math.inf:
            raise ValueError(
                f"budget is {self.budget}, expected a loss above 0 nats/token; no budget needs no plan"
            )
        if not self.lengths or list(self.lengths) != sorted(set(self.lengths)) or self.lengths[0] < 32:
            raise ValueError(
                f"lengths is {list(self.lengths)}, expected rising numbers of at least 32 tokens"
            )
        for name in ("sequences", "rows", "labels", "joint", "tries", "needles", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.decode_tokens < 0:
            raise ValueError(f"decode_tokens is {self.decode_tokens}, expected at least 0")
        if self.rounds < 0 or self.rounds == 1:
            raise ValueError(f"rounds is {self.rounds}, expected at least 2, or 0 for no timing")
        if self.optimize not in OPTIMIZED:
            raise ValueError(f"optimize is {self.optimize!r}, expected one of {', '.join(OPTIMIZED)}")
        if self.kv_bytes is not None and not 0.0 < self.kv_bytes < 1.0:
            raise ValueError(
                f"kv_bytes is {self.kv_bytes}, expected a share of the bytes below 1, such as 0.4x"
            )
        if self.with_cache and "window" not in self.families:
            raise ValueError(
                f"families is {','.join(self.families)}, expected window among them: only heads with windows keep less "
                "in a cache, so add it, or leave optimize and kv_bytes out"
            )
        if self.minutes is not None and not self.minutes > 0.0:
            raise ValueError(f"minutes is {self.minutes}, expected a time above 0, or None for no end")
        if self.bolder < 0:
            raise ValueError(f"bolder is {self.bolder}, expected a number of plans, 0 for none")
        if self.most_held_out < self.held_out:
            raise ValueError(
                f"most_held_out is {self.most_held_out}, expected at least the {self.held_out} sequences of held_out"
            )
        if not 0.0 <= self.top1 < 1.0:
            raise ValueError(f"top1 is {self.top1}, expected a share of the tokens below 1, such as 0.99")
        if self.kl_p999 is not None and not self.kl_p999 > 0.0:
            raise ValueError(f"kl_p999 is {self.kl_p999}, expected a KL above 0 nats, or None for no limit")
        if self.needles_lost is not None and not 0.0 <= self.needles_lost < 1.0:
            raise ValueError(f"needles_lost is {self.needles_lost}, expected a share below 1, such as 0.02")
        if not 0.0 < self.alpha < 1.0:
            raise ValueError(f"alpha is {self.alpha}, expected an error rate between 0 and 1, such as 0.05")
        if self.held_out < 2:
            raise ValueError(f"held_out is {self.held_out}, expected at least 2: one sequence has no spread")

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
