"""Predicts the upper bound of a plan's held-out loss from its KL, and the largest KL that stays within a budget.

For small changes the mean loss difference is proportional to the KL, and its standard deviation to the square root of
the KL. Both factors are fitted to whole plans measured on calibration text, and updated after every held-out shard:

    predicted bound = (per_kl + caution * per_kl_error) * KL + t * spread * sqrt((KL + rounding) / sequences)

In half precision two exact kernels differ by a KL of their own, `rounding`. It favours neither of them, so that it adds
to the spread and not to the mean; KL above is what a plan adds to it.

The prediction only chooses which plan to test. The proof is a test on text that was not used for the fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..stats.paired import student_quantile

CAUTION = 1.0
"""Standard errors that are added to the fitted loss per KL, so that a prediction errs on the safe side."""
PRIOR_SEQUENCES = 3.0
"""Weight of the prior standard deviation, in sequences."""
PRIOR_ERROR = 0.5
"""Standard error of the prior that a nat of KL costs a nat of loss."""
CORRELATED = 2.0
"""Prior variance of a sequence's mean, relative to that of independent tokens."""
ENOUGH = 0.9
"""Less text is enough once it affords this share of the KL that all of it would afford."""


@dataclass(frozen=True)
class Observation:
    """The measured losses of one plan on several sequences: mean differences `deltas` `[sequences]`, nats/token.

    `kl` is its mean KL on the calibration text that plans are compared on, nats/token, with that of rounding.
    """

    kl: float
    deltas: NDArray[np.float64]
    sources: tuple[str, ...]


@dataclass(frozen=True)
class LossLaw:
    """Mean and standard deviation of the loss difference as functions of the KL.

    Attributes:
        per_kl: Mean loss difference per nat of KL.
        per_kl_error: Its standard error, with the variance between sources.
        spread: Standard deviation over sequences of the mean loss difference, per square root of the KL.
        rounding: Mean KL of two exact implementations, nats/token.
    """

    per_kl: float
    per_kl_error: float
    spread: float
    rounding: float = 0.0

    @classmethod
    def first_guess(cls, tokens: float, rounding: float = 0.0) -> LossLaw:
        """Returns the prior, for sequences with `tokens` scored tokens each.

        The loss difference of one token has variance 2 KL.
        """
        return cls(1.0, PRIOR_ERROR, math.sqrt(2.0 * CORRELATED / tokens), rounding)

    def learned(self, observations: Sequence[Observation]) -> LossLaw:
        """Returns the law updated with measured plans, all of them on the same sequences.

        Such plans are not independent, so standard errors count sequences and not plans.
        """
        useful = [observation for observation in observations if observation.kl > self.rounding]
        if not useful:
            return self
        kl = np.array([plan.kl for plan in useful])
        added = kl - self.rounding
        per_sequence = np.sum([plan.deltas for plan in useful], axis=0) / added.sum()
        count = len(per_sequence)
        mean = float(per_sequence.mean())
        residual = [
            np.square(plan.deltas - mean * own).sum() / plan.kl for plan, own in zip(useful, added, strict=True)
        ]
        spread = math.sqrt(
            (PRIOR_SEQUENCES * self.spread**2 + float(np.mean(residual))) / (PRIOR_SEQUENCES + count - 1)
        )
        # from the regularised spread: that of a few sequences may be close to 0 by chance
        error = spread * float(np.sqrt(kl).sum() / added.sum()) / math.sqrt(count)
        weight = self.per_kl_error**2 / (self.per_kl_error**2 + error**2)
        between = _between_sources(per_sequence, useful[0].sources, error**2 * count)
        per_kl = weight * mean + (1.0 - weight) * self.per_kl
        return LossLaw(per_kl, math.sqrt(weight * error**2 + between), spread, self.rounding)

    def affordable(self, bound: float, sequences: int, level: float) -> float:
        """Returns the largest KL whose predicted bound is `bound`; infinite if the loss does not grow with the KL.

        It is 0 where the spread of rounding takes all of the bound.
        """
        quantile = student_quantile(1.0 - level, max(sequences - 1, 1))
        linear, root = self.per_kl + CAUTION * self.per_kl_error, quantile * self.spread / math.sqrt(sequences)
        if linear <= 0.0:
            return math.inf if root <= 0.0 else max((bound / root) ** 2 - self.rounding, 0.0)
        whole = bound + linear * self.rounding
        root_kl = (math.sqrt(root**2 + 4.0 * linear * whole) - root) / (2.0 * linear)
        return max(root_kl**2 - self.rounding, 0.0)

    def shard(self, bound: float, first: int, most: int, level: float) -> int:
        """Returns how many held-out sequences to use: more would hardly raise the KL that the budget affords."""
        sufficient = ENOUGH * self.affordable(bound, most, level)
        return next((size for size in range(first, most) if self.affordable(bound, size, level) >= sufficient), most)


def _between_sources(per_sequence: NDArray[np.float64], sources: Sequence[str], variance: float) -> float:
    """The variance of the loss per KL between sources, less what the variance within them explains."""
    names = sorted(set(sources))
    if len(names) < 2:
        return 0.0
    groups = [per_sequence[[source == name for source in sources]] for name in names]
    means = np.array([group.mean() for group in groups])
    within = variance * float(np.mean([1.0 / len(group) for group in groups]))
    return max(float(means.var(ddof=1)) - within, 0.0)
