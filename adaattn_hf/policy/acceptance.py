"""Whether a plan passes: a paired, clustered, one-sided non-inferiority test, and gates beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats


@dataclass(frozen=True)
class Bound:
    """Mean of paired differences with a one-sided upper bound.

    Attributes:
        mean: Mean per token, nats.
        upper: Upper confidence bound of the mean; infinite with a single cluster.
        clusters: Number of clusters.
        tokens: Number of tokens.
    """

    mean: float
    upper: float
    clusters: int
    tokens: int


def upper_bound(sums: NDArray[np.float64], tokens: NDArray[np.int64], confidence: float) -> Bound:
    """Returns the one-sided bound of a ratio of sums, by Student's t on the residuals of the clusters.

    Args:
        sums: `[clusters]`, sum of the token differences.
        tokens: `[clusters]`, tokens.
        confidence: Level of the bound, 0.95 say.
    """
    clusters, total = len(sums), int(tokens.sum())
    mean = float(sums.sum() / total)
    if clusters < 2:
        return Bound(mean, math.inf, clusters, total)
    residual = sums - mean * tokens
    error = math.sqrt(clusters / (clusters - 1) * float(residual @ residual)) / total
    return Bound(mean, mean + float(stats.t.ppf(confidence, clusters - 1)) * error, clusters, total)


def clustered(
    names: Sequence[str], sums: Sequence[float], tokens: Sequence[int], least: int = 8
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Returns sums and tokens per document, or per stretch of text where there are fewer than `least` documents."""
    keys = list(names) if len(set(names)) >= least else [str(index) for index in range(len(names))]
    order = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    grouped, counts = np.zeros(len(order)), np.zeros(len(order), dtype=np.int64)
    for key, value, count in zip(keys, sums, tokens, strict=True):
        grouped[order[key]] += value
        counts[order[key]] += count
    return grouped, counts


@dataclass(frozen=True)
class Gates:
    """Limits that a plan must keep beside the bound of its loss.

    Attributes:
        budget: Upper bound of the loss difference, nats/token; the mean KL keeps it too.
        top1: Least share of tokens with the same likeliest token.
        needles: Most needles lost (net) per needle that stock attention finds.
    """

    budget: float
    top1: float
    needles: float = 0.02

    @classmethod
    def for_budget(cls, budget: float) -> Gates:
        """Returns the gates of a budget: flips of the likeliest token grow like sqrt(2 KL), as differences do."""
        return cls(budget, 1.0 - 0.32 * math.sqrt(budget))

    def failures(self, upper: float, kl: float, top1: float, lost: int, found: int) -> tuple[str, ...]:
        """Returns a sentence for each gate that is not passed.

        Args:
            upper: Upper bound of the loss difference, nats/token.
            kl: Mean KL, nats/token.
            top1: Share of tokens with the same likeliest token.
            lost: Needles lost, less needles won.
            found: Needles that stock attention finds.
        """
        reasons = []
        if not upper <= self.budget:
            reasons.append(
                f"the upper bound of the loss difference is {upper:.2e} nats/token, above {self.budget:.2e}"
            )
        if not kl <= self.budget:
            reasons.append(f"the mean KL is {kl:.2e} nats/token, above {self.budget:.2e}")
        if not top1 >= self.top1:
            reasons.append(f"the likeliest token agrees on {top1:.2%}, below {self.top1:.2%}")
        if lost > math.ceil(self.needles * found):
            reasons.append(f"{lost} of {found} needles are lost, more than {math.ceil(self.needles * found)}")
        return tuple(reasons)
