"""Group-sequential testing: the significance level of each look at growing evidence, by alpha spending.

Lan and DeMets (1983, "Discrete sequential boundaries for clinical trials", Biometrika 70) let a function of the share
of information decide how much of the error rate alpha has been spent by a look; theirs of the O'Brien-Fleming type,
2 - 2 Phi(z / sqrt(t)) with z the normal quantile of 1 - alpha/2, spends little early. Each look is tested at what it
newly spends. By the union bound the probability of a false pass over all looks is at most alpha, whatever their
correlation and with Student's t at every look; exact boundaries, which use the correlation, would be a little lower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from ..stats.paired import Ratio, student_quantile

NORMAL = NormalDist()
LOOKS = 3
"""Largest number of looks at one plan."""
HOPELESS = 0.05
"""Futility bound: a plan that would pass the last look with a smaller probability is given up."""


def look_levels(alpha: float, sizes: Sequence[int]) -> list[float]:
    """Returns the significance level of each look, what the spending function newly spends; their sum is `alpha`.

    `sizes` are the cumulative sequences at each look, rising; the last is the largest number there will be.
    """
    quantile = NORMAL.inv_cdf(1.0 - alpha / 2.0)
    spent = [2.0 * NORMAL.cdf(-quantile / math.sqrt(size / sizes[-1])) for size in sizes]
    return [rate - before for rate, before in zip(spent, [0.0, *spent[:-1]], strict=True)]


def look_sizes(first: int, most: int) -> list[int]:
    """Returns the cumulative sequences at each look: up to `LOOKS` equal steps of at least `first`."""
    looks = max(1, min(LOOKS, most // first))
    return [math.ceil(most * look / looks) for look in range(1, looks + 1)]


def hopeless(ratio: Ratio, limit: float, sizes: Sequence[int], size: int, level: float) -> bool:
    """Whether the bound falls below its limit at the last look with a probability of less than `HOPELESS`.

    Stopping for futility cannot cause a false pass, so it spends none of the error rate. `sizes` are sequences at each
    look, `level` that of the last.
    """
    if ratio.error is None or size >= sizes[-1]:
        return False
    last = ratio.error * math.sqrt(size / sizes[-1])
    quantile = student_quantile(1.0 - level, max(ratio.clusters - 1, 1))
    wander = math.sqrt(max(ratio.error**2 - last**2, 0.0))
    return ratio.mean + quantile * last - NORMAL.inv_cdf(1.0 - HOPELESS) * wander > limit


@dataclass(frozen=True)
class Attempts:
    """How many plans may be tested, and at which level each.

    Each plan is tested on text that no earlier plan was tested on, so what was learned from those does not bias its
    test. Ever bolder plans, tested at the same level for as long as all pass, have together the error rate of one: only
    the first plan that breaks the budget can pass falsely (fixed-sequence testing; Westfall and Krishen 2001,
    "Optimally weighted, fixed sequence and gatekeeper multiple testing procedures"). A failure ends the sequence. The
    next has a share of the error rate of its own, which is divided evenly among the failures that are allowed
    (Bonferroni).

    Attributes:
        alpha: Error rate of all tests together.
        advances_allowed: Largest number of bolder plans after one that passed.
        reserved: Shares of the error rate, each as large as a failure's, kept for what is tested if every plan fails.
        advances: Bolder plans tried so far.
    """

    alpha: float
    failures_allowed: int
    advances_allowed: int
    reserved: int = 0
    failures: int = 0
    advances: int = 0

    @property
    def level(self) -> float:
        """Significance level of the next plan's test."""
        return self.alpha / (self.failures_allowed + self.reserved)

    @property
    def left(self) -> float:
        """The error rate that no failure has spent."""
        return self.alpha - self.failures * self.level

    @property
    def exhausted(self) -> bool:
        """Whether no further plan may be tested."""
        return self.failures >= self.failures_allowed

    def failed(self) -> Attempts:
        """Returns the state after a failure."""
        return replace(self, failures=self.failures + 1)

    def advanced(self) -> Attempts | None:
        """Returns the state when a bolder plan follows one that passed, `None` if none may."""
        if self.advances >= self.advances_allowed or self.exhausted:
            return None
        return replace(self, advances=self.advances + 1)
