"""How a plan is made, and what making it found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from adaattn_hf.plan import Plan
from adaattn_hf.policy.candidates import FAMILIES, MASSES, WINDOWS


@dataclass(frozen=True)
class CalibrationSettings:
    """How a plan is made.

    Attributes:
        budget: Allowed loss, nats/token; ln(1 + b) for a relative rise b of the perplexity.
        lengths: Length bins in tokens, rising; beyond the last one the plan is exact.
        seed: Seed of the text sample, the labels, the rows and the needles.
        sequences: Sequences per length that risks are measured on.
        rows: Query rows sampled per sequence.
        labels: Label draws, one backward pass each.
        direct: Pairs of unit and choice whose KL is measured by forward passes of their own; see
            `policy.decisive`.
        joint: Sequences per length that re-scale the risks.
        held_out: Sequences per length and try that verify.
        tries: Plans that may be verified before the answer is "exact".
        haystacks: Held-out sequences per length that also carry needles.
        needles: Needles per haystack, fewer where a length holds fewer.
        families: Kinds of choices to consider; see `policy.candidates.FAMILIES`.
        windows: Windows to consider.
        masses: Shares of attention to keep by blocks.
        decode_tokens: Decode steps per prefill, which weigh the prices of the phases.
        alpha: Level of the test over all tries.
    """

    budget: float = 9.995003330835334e-04
    lengths: tuple[int, ...] = (4096,)
    seed: int = 0
    sequences: int = 4
    rows: int = 256
    labels: int = 2
    direct: int = 0
    joint: int = 3
    held_out: int = 12
    tries: int = 3
    haystacks: int = 1
    needles: int = 8
    families: tuple[str, ...] = FAMILIES
    windows: tuple[int, ...] = WINDOWS
    masses: tuple[float, ...] = MASSES
    decode_tokens: int = 64
    alpha: float = 0.05

    def __post_init__(self) -> None:
        if not self.budget > 0.0:
            raise ValueError(
                f"budget is {self.budget}, expected a loss above 0 nats/token; no budget needs no plan"
            )
        if not self.lengths or list(self.lengths) != sorted(set(self.lengths)) or self.lengths[0] < 32:
            raise ValueError(
                f"lengths is {list(self.lengths)}, expected rising numbers of at least 32 tokens"
            )
        for name in ("sequences", "rows", "labels", "joint", "tries", "needles"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.direct < 0:
            raise ValueError(f"direct is {self.direct}, expected a number of pairs, 0 for none")
        if self.decode_tokens < 0:
            raise ValueError(f"decode_tokens is {self.decode_tokens}, expected at least 0")
        if self.held_out < 2:
            raise ValueError(f"held_out is {self.held_out}, expected at least 2: one sequence has no spread")


@dataclass(eq=False)
class Calibration:
    """What a calibration found.

    Attributes:
        plan: The plan: verified, or exact where none passed.
        tensors: Bases and means that the plan needs, by name.
        met: Whether a plan that approximates passed.
        sentence: The outcome in words.
        report: Everything measured, for a report.
    """

    plan: Plan
    tensors: dict[str, Tensor]
    met: bool
    sentence: str
    report: dict[str, Any] = field(default_factory=dict)
