"""The settings of a calibration, which are options of `adaattn calibrate`, and its result."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ..plans.evidence import LEVEL, LOST

if TYPE_CHECKING:  # help of the command reads the settings, and does not wait for torch
    from ..plans.plan import Plan

_OF_THE_PROOF = (
    "budget", "held_out", "most_held_out", "tries", "bolder", "haystacks", "top1", "needles_lost",
    "alpha", "minutes", "rounds", "optimize", "kv_bytes", "batch", "captured",
)  # fmt: skip
"""Settings that do not affect the measurement of risks."""


OPTIMIZED = ("time", "memory")
NO_OPTION = {"option": None}
"""Of settings that are only for programs, or that the command works out itself."""


def share(text: str, argument: str) -> float:
    """Returns a share as people write it: `40%`, `0.4` or `0.4x`; all else is a ValueError."""
    number = text.strip()
    unit, parts = ("%", 100.0) if number.endswith("%") else ("x", 1.0)
    try:
        return float(number.removesuffix(unit)) / parts
    except ValueError as error:
        raise ValueError(f"{argument} is {text!r}, expected a share such as 99%, 0.99 or 0.99x") from error


def kinds(text: str, argument: str) -> tuple[str, ...]:
    """Returns kinds of choices by commas, `window,bf16` say; a ValueError if one is unknown, or there is none."""
    from ..policy.candidates import known_families, refuse_unknown

    found = tuple(part.strip() for part in text.split(",") if part.strip())
    if not found:
        raise ValueError(f"{argument} is {text!r}, expected some of {','.join(known_families())}")
    refuse_unknown(found)
    return found


def _families() -> tuple[str, ...]:
    from ..policy.candidates import FAMILIES

    return FAMILIES


def _windows() -> tuple[int, ...]:
    from ..plans.choices.window import WINDOWS

    return WINDOWS


@dataclass(frozen=True)
class Judged:
    """By which text and limits a plan is judged; who verifies it again says so anew.

    Attributes:
        seed: Seed of every random choice: the text sample, the labels, the rows and the needles.
        sequences: Sequences per length that risks are measured on.
        joint: Sequences per length that re-scale the risks, by measuring whole plans.
        most_held_out: Held-out sequences per length at the last look, where the first do not decide; never fewer than
            at the first.
        top1: Least agreement on the likeliest token (99%). Default: as the budget.
        needles_lost: Share of the needles that may be lost (2%). Default: 2% beyond chance.
    """

    seed: int = 0
    sequences: int = 4
    joint: int = 3
    most_held_out: int = 36
    top1: float = field(default=0.0, metadata={"read": share})
    needles_lost: float | None = field(default=None, metadata={"option": "--needles", "read": share})


@dataclass(frozen=True)
class CalibrationSettings(Judged):
    """Settings of a calibration.

    Attributes:
        budget: Allowed loss, nats/token; ln(1 + b) for a relative rise b of the perplexity.
        lengths: Length bins in tokens, rising; tokens that see more keys than the last one are exact.
        rows: Query rows sampled per sequence.
        labels: Label draws per sequence, one backward pass each.
        held_out: Held-out sequences per length at the first look at a plan.
        tries: Plans that may fail before the answer is exact.
        bolder: Further plans to try, each closer to the budget, after one that passed with room to spare.
        haystacks: Held-out sequences per length that also carry needles.
        needles: Needles per haystack, fewer where a length holds fewer.
        families: Kinds of choices by commas, some of `families`. Default: all that need not be named, on a GPU without
            ranks.
        windows: Windows to consider.
        decode_tokens: Decode steps per prefill, for the prices.
        batch: Sequences at once, for the prices and for whole passes.
        captured: Price decode steps as in captured CUDA graphs, which generation with a static cache makes: by the
            device's time alone, with nothing of the host's.
        alpha: Significance level of the tests of all plans together.
        minutes: End after so many minutes, with the best plan that is verified by then.
        rounds: Rounds in which whole forward passes are timed after a plan has passed; 0 for none.
        optimize: memory: the smallest cache inside the budget, windows alone.
        kv_bytes: Bytes of the cache at the longest length, as a share of the model's (0.4x).
    """

    budget: float = field(default=9.995003330835334e-04, metadata=NO_OPTION)
    lengths: tuple[int, ...] = field(default=(4096,), metadata=NO_OPTION)
    rows: int = 256
    labels: int = 2
    held_out: int = 12
    tries: int = 3
    bolder: int = 2
    haystacks: int = field(default=4, metadata=NO_OPTION)
    needles: int = field(default=16, metadata=NO_OPTION)
    families: tuple[str, ...] = field(
        default_factory=_families, metadata={"read": kinds, "names": ("plans/choices/*.py", "families")}
    )
    windows: tuple[int, ...] = field(default_factory=_windows, metadata=NO_OPTION)
    decode_tokens: int = 64
    batch: int = field(default=1, metadata={"option": "--batch-size"})
    captured: bool = False
    alpha: float = field(default=0.05, metadata=NO_OPTION)
    minutes: float | None = None
    rounds: int = field(default=4, metadata=NO_OPTION)
    optimize: str = field(default="time", metadata={"choices": OPTIMIZED})
    kv_bytes: float | None = field(default=None, metadata={"read": share})

    def __post_init__(self) -> None:
        object.__setattr__(self, "most_held_out", max(self.most_held_out, self.held_out))
        counted = ("sequences", "rows", "labels", "joint", "tries", "needles", "batch")
        lengths, kv_bytes, lost = self.lengths, self.kv_bytes, self.needles_lost
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
            ("top1", 0.0 <= self.top1 < 1.0, "a share of the tokens below 1, such as 0.99"),
            ("needles_lost", lost is None or 0.0 <= lost <= LOST, f"a share of at most {LOST}, such as 0.02"),
            ("alpha", 0.0 < self.alpha <= 1.0 - LEVEL, "an error rate above 0 and of at most 0.05"),
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
    """The result of a calibration: the plan, verified, or exact if none passed (not `met`).

    `sentence` is the outcome in words, `report` everything measured.
    """

    plan: Plan
    met: bool
    sentence: str
    report: dict[str, Any] = field(default_factory=dict)
