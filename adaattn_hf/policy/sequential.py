"""Group-sequential testing: how much of an error rate each look at growing evidence may spend.

Lan and DeMets (1983, "Discrete sequential boundaries for clinical trials", Biometrika 70) let a function of the share
of information decide how much of the error rate alpha has been spent by a look; theirs of the O'Brien-Fleming type,
2 - 2 Phi(z / sqrt(t)) with z the normal quantile of 1 - alpha/2, spends little early. Each look is tested at what it
newly spends. By the union bound the looks together err at most with probability alpha, whatever their correlation
and with Student's t at every look; the exact boundaries, which reckon with the correlation, are a little lower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from ..stats.paired import Ratio, student_quantile

NORMAL = NormalDist()
LOOKS = 3
"""Looks at the evidence of one plan at most."""
HOPELESS = 0.05
"""A plan whose chance to pass at the last look is smaller than this is given up."""


def spent(alpha: float, information: float) -> float:
    """Returns the error rate that may have been spent once a share of the information is there.

    Args:
        alpha: Error rate of all looks, in (0, 1).
        information: Share of the information, in (0, 1].

    Raises:
        ValueError: If either is out of range.
    """
    if not 0.0 < alpha < 1.0 or not 0.0 < information <= 1.0:
        raise ValueError(
            f"alpha is {alpha} and information {information}, expected a rate in (0, 1) and a share in (0, 1]"
        )
    quantile = NORMAL.inv_cdf(1.0 - alpha / 2.0)
    return 2.0 * NORMAL.cdf(-quantile / math.sqrt(information))


def look_levels(alpha: float, sizes: Sequence[int]) -> list[float]:
    """Returns the level of each look; they add up to `alpha`.

    Args:
        alpha: Error rate of all looks.
        sizes: Sequences at each look, those before counted, rising; the last is the most there will be.
    """
    rates = [spent(alpha, size / sizes[-1]) for size in sizes]
    return [rate - before for rate, before in zip(rates, [0.0, *rates[:-1]], strict=True)]


def look_sizes(first: int, most: int) -> list[int]:
    """Returns the sequences at each look: up to `LOOKS` of equal steps, the first of at least `first`."""
    looks = max(1, min(LOOKS, most // first))
    return [math.ceil(most * look / looks) for look in range(1, looks + 1)]


def hopeless(ratio: Ratio, limit: float, sizes: Sequence[int], size: int, level: float) -> bool:
    """Whether growing evidence has less than a chance of `HOPELESS` to bring a bound below its limit.

    Giving up never makes a false pass likelier, so that it costs nothing of the error rate.

    Args:
        ratio: The estimate at this look.
        limit: What the upper bound must not exceed at the last look.
        sizes: Sequences at each look.
        size: Sequences at this one.
        level: Level of the last look.
    """
    if ratio.error is None or size >= sizes[-1]:
        return False
    last = ratio.error * math.sqrt(size / sizes[-1])
    quantile = student_quantile(1.0 - level, max(ratio.clusters - 1, 1))
    wander = math.sqrt(max(ratio.error**2 - last**2, 0.0))
    return ratio.mean + quantile * last - NORMAL.inv_cdf(1.0 - HOPELESS) * wander > limit


@dataclass(frozen=True)
class Attempts:
    """How many plans may be proved, and at which level each.

    A plan is tested on text that no plan before it has seen, so that what was learned from the others changes
    nothing about its test. Bolder and bolder plans, each tested at the same level and only as long as all pass, err
    together no more than one of them: only the first plan that breaks the budget can pass wrongly (fixed-sequence
    testing; Westfall and Krishen 2001, "Optimally weighted, fixed sequence and gatekeeper multiple testing
    procedures"). After a failure such a sequence ends, and the next begins with a share of its own: the error rate
    is divided by the failures that are allowed.

    Attributes:
        alpha: Error rate of everything.
        failures_allowed: Plans that may fail.
        advances_allowed: Bolder plans that may follow one that passed.
        failures: Plans that failed.
        advances: Bolder plans tried.
    """

    alpha: float
    failures_allowed: int
    advances_allowed: int
    failures: int = 0
    advances: int = 0

    @property
    def level(self) -> float:
        """Error rate of the next plan's test."""
        return self.alpha / self.failures_allowed

    @property
    def exhausted(self) -> bool:
        """Whether no plan may be tested any more."""
        return self.failures >= self.failures_allowed

    def failed(self) -> Attempts:
        """Returns what is left after a failure."""
        return Attempts(
            self.alpha, self.failures_allowed, self.advances_allowed, self.failures + 1, self.advances
        )

    def advanced(self) -> Attempts | None:
        """Returns what is left when a bolder plan follows one that passed, `None` if none may."""
        if self.advances >= self.advances_allowed or self.exhausted:
            return None
        return Attempts(
            self.alpha, self.failures_allowed, self.advances_allowed, self.failures, self.advances + 1
        )
