"""Predicts the upper bound of a plan's loss on held-out text, and the KL at which it meets a budget.

For small changes the mean loss difference is proportional to the KL and its spread to the root of it. The law of a
model on its text is learned from whole plans measured on calibration text, and again from every held-out shard that
was looked at:

    predicted bound = (per_kl + caution * per_kl_error) * KL + t * spread * sqrt(KL / sequences)

It aims; it proves nothing. The proof is a test on text that the law has never seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..stats.paired import student_quantile

CAUTION = 1.0
"""Standard errors of the law that a prediction stays on the safe side by."""
PRIOR_SEQUENCES = 3.0
"""Sequences that the first guess of the spread counts for."""
PRIOR_ERROR = 0.5
"""Standard error of the first guess that a nat of KL costs a nat of loss."""
CORRELATED = 2.0
"""Variance of a sequence's mean over that of independent tokens, in the first guess."""
ENOUGH = 0.9
"""Share of the KL that the most text affords at which less text is enough."""


@dataclass(frozen=True)
class Observation:
    """One plan on several sequences.

    Attributes:
        kl: Mean KL of the plan on the calibration text that plans are compared on, nats/token.
        deltas: `[sequences]`, mean loss difference of each, nats/token.
        sources: The source of each sequence.
    """

    kl: float
    deltas: NDArray[np.float64]
    sources: tuple[str, ...]


@dataclass(frozen=True)
class LossLaw:
    """How loss and its spread follow the KL.

    Attributes:
        per_kl: Mean loss difference per nat of KL.
        per_kl_error: Standard error of it, the spread between sources counted.
        spread: Standard deviation over sequences of the mean loss difference, per root of the KL.
    """

    per_kl: float
    per_kl_error: float
    spread: float

    @classmethod
    def first_guess(cls, tokens: float) -> LossLaw:
        """Returns the law before anything was measured, for sequences with that many scored tokens.

        A token's loss difference has the variance 2 KL.
        """
        return cls(1.0, PRIOR_ERROR, math.sqrt(2.0 * CORRELATED / tokens))

    def learned(self, observations: Sequence[Observation]) -> LossLaw:
        """Returns the law after plans were observed, all of them on the same sequences.

        Plans on the same sequences are not independent: the errors are those over sequences, however many plans.
        """
        useful = [one for one in observations if one.kl > 0.0]
        if not useful:
            return self
        kl = np.array([one.kl for one in useful])
        per_sequence = np.sum([one.deltas for one in useful], axis=0) / kl.sum()
        count = len(per_sequence)
        mean = float(per_sequence.mean())
        residual = [np.square(one.deltas - mean * one.kl).sum() / one.kl for one in useful]
        spread = math.sqrt(
            (PRIOR_SEQUENCES * self.spread**2 + float(np.mean(residual))) / (PRIOR_SEQUENCES + count - 1)
        )
        # from the spread that is believed: that of few sequences may look like nothing; noise of plans adds up
        error = spread * float(np.sqrt(kl).sum() / kl.sum()) / math.sqrt(count)
        weight = self.per_kl_error**2 / (self.per_kl_error**2 + error**2)
        between = _between_sources(per_sequence, useful[0].sources, error**2 * count)
        return LossLaw(
            weight * mean + (1.0 - weight) * self.per_kl,
            math.sqrt(weight * error**2 + between),
            spread,
        )

    def bound(self, kl: float, sequences: int, level: float) -> float:
        """Returns the predicted upper bound of the loss difference, nats/token.

        Args:
            kl: Mean KL, nats/token.
            sequences: Held-out sequences.
            level: Error rate of the bound.
        """
        linear, root = self._terms(sequences, level)
        return linear * kl + root * math.sqrt(kl)

    def affordable(self, bound: float, sequences: int, level: float) -> float:
        """Returns the KL whose predicted bound is `bound`; infinite if the loss does not grow with the KL."""
        linear, root = self._terms(sequences, level)
        if linear <= 0.0:
            return math.inf if root <= 0.0 else (bound / root) ** 2
        return ((math.sqrt(root**2 + 4.0 * linear * bound) - root) / (2.0 * linear)) ** 2

    def _terms(self, sequences: int, level: float) -> tuple[float, float]:
        quantile = student_quantile(1.0 - level, max(sequences - 1, 1))
        return self.per_kl + CAUTION * self.per_kl_error, quantile * self.spread / math.sqrt(sequences)

    def shard(self, bound: float, first: int, most: int, level: float) -> int:
        """Returns how many held-out sequences are enough: with more, noise would take little less of the budget."""
        wanted = ENOUGH * self.affordable(bound, most, level)
        return next(
            (size for size in range(first, most) if self.affordable(bound, size, level) >= wanted), most
        )


def _between_sources(per_sequence: NDArray[np.float64], sources: Sequence[str], variance: float) -> float:
    """The variance of the loss per KL between sources, beyond what the spread within them explains."""
    names = sorted(set(sources))
    if len(names) < 2:
        return 0.0
    groups = [per_sequence[[source == name for source in sources]] for name in names]
    means = np.array([group.mean() for group in groups])
    within = variance * float(np.mean([1.0 / len(group) for group in groups]))
    return max(float(means.var(ddof=1)) - within, 0.0)
