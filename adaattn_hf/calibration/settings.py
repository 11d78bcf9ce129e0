"""The settings of a calibration, and its result.

A setting that is an option of `adaattn calibrate` is explained by the help of that option.
"""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from ..plans.choices.window import WINDOWS
from ..plans.limits import LEVEL, LOST
from ..plans.plan import Plan
from ..policy.candidates import FAMILIES

_OF_THE_PROOF = (
    "budget", "held_out", "haystacks", "top1", "max_kl", "needles_lost", "alpha", "minutes", "rounds",
    "kv_bytes", "batch", "captured",
)  # fmt: skip
"""Settings that do not affect what is measured before a plan is sought: risks, and what is priced."""

AIMS = ("prompt", "step", "memory")


@dataclass(frozen=True)
class CalibrationSettings:
    """Settings of a calibration."""

    # by which text and limits a plan is judged: who verifies it again says so anew
    seed: int = 0
    sequences: int = 4
    joint: int = 3
    held_out: int = 24
    top1: float = 0.0
    max_kl: float | None = None
    needles_lost: float | None = None
    # what it is made by
    budget: float = 9.995003330835334e-04  # nats/token; ln(1 + b) for a relative rise b of the perplexity
    lengths: tuple[int, ...] = (4096,)
    rows: int = 256
    labels: int = 2
    haystacks: int = 4  # held-out sequences per length that also carry needles
    needles: int = 16  # in each of them, fewer where a length holds fewer
    families: tuple[str, ...] = FAMILIES
    windows: tuple[int, ...] = WINDOWS  # those to consider
    batch: int = 1
    captured: bool = False
    alpha: float = 0.05  # significance level of the sequence of candidates, and of each of them
    minutes: float | None = None
    rounds: int = 4  # in which whole passes are timed after a plan has passed; 0 for none
    aim: str = "prompt"
    kv_bytes: float | None = None

    def __post_init__(self) -> None:
        counted = ("sequences", "rows", "labels", "joint", "needles", "batch")
        lengths, kv_bytes, lost = self.lengths, self.kv_bytes, self.needles_lost
        rising = bool(lengths) and list(lengths) == sorted(set(lengths)) and lengths[0] >= 32
        skips_keys = self.aim == "prompt" or "window" in self.families
        # name, whether its value is allowed, what is expected, and how the value is told if not by itself
        for name, allowed, expected, *told in (
            ("budget", 0.0 < self.budget < math.inf, "a loss above 0 nats/token; no budget needs no plan"),
            ("lengths", rising, "rising numbers of at least 32 tokens", list(lengths)),
            *((name, getattr(self, name) >= 1, "at least 1") for name in counted),
            ("rounds", self.rounds >= 0 and self.rounds != 1, "at least 2, or 0 for no timing"),
            ("aim", self.aim in AIMS, f"one of {', '.join(AIMS)}", repr(self.aim)),
            ("kv_bytes", kv_bytes is None or 0.0 < kv_bytes < 1.0,
             "a share of the bytes below 1, such as 0.4x"),
            ("kv_bytes", kv_bytes is None or self.with_cache,
             f"none beside the aim {self.aim!r}: only a cache has bytes; add --aim memory"),
            ("families", skips_keys,
             f"window among them: only keys that are not read save anything of a {self.aim}, so add it, or leave --aim "
             "out", ",".join(self.families)),
            ("minutes", self.minutes is None or self.minutes > 0.0, "a time above 0, or None for no end"),
            ("max_kl", self.max_kl is None or self.max_kl > 0.0, "a KL above 0 nats/token, or None for the budget's"),
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
        return self.aim == "memory"

    @property
    def prompts(self) -> int:
        """How many prompts a whole pass reads at once; the rows of another aim are those of a step."""
        return self.batch if self.aim == "prompt" else 1

    def measured(self) -> dict[str, Any]:
        """Returns the settings that risks and prices depend on; one measurement serves all budgets and their proofs."""
        words = asdict(self)
        for name in _OF_THE_PROOF:
            del words[name]
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
