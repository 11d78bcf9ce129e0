"""Whether a plan passes: a paired, clustered, one-sided non-inferiority test, and gates beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from ..stats.paired import clustered_ratio


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
    found = clustered_ratio(sums, tokens)
    return Bound(found.mean, found.upper(confidence), found.clusters, int(tokens.sum()))


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


SLACK = 1.5
"""How many times the flips that a budget goes with by the model's own law may be seen."""
SIGNIFICANT = 0.05
"""Level of the test that needles were lost and not changed by chance."""
NEEDLES = 0.02
"""Share of the needles found by stock attention that may be lost, net."""


@dataclass(frozen=True)
class Gates:
    """Limits that a plan must keep.

    The budget is the perplexity's. The other gates agree with it unless the user gives them: flips of the likeliest
    token follow the root of the KL by the law measured on this model, and two stock implementations flip some, too.

    Attributes:
        budget: Upper bound of the loss difference, nats/token; the mean KL keeps it too.
        top1: Least share of tokens with the same likeliest token.
        kl_p999: Largest 99.9th percentile of the KL of a token, nats.
        needles: Most needles lost (net) per needle that stock attention finds. `None`: no more than `NEEDLES`, unless
            it may be chance.
    """

    budget: float
    top1: float = 0.0
    kl_p999: float = math.inf
    needles: float | None = None

    def with_flips(self, per_root_kl: float, stock: float) -> Gates:
        """Returns the gates with a limit on flips where the user gave none.

        Args:
            per_root_kl: Flips per token over the root of the KL, measured on this model.
            stock: Flips per token between two stock implementations in the model's dtype.
        """
        if self.top1 > 0.0:
            return self
        return replace(self, top1=1.0 - max(SLACK * per_root_kl * math.sqrt(self.budget), stock))

    def failures(
        self, upper: float, kl: float, top1: float, lost: int, won: int, found: int, kl_p999: float = 0.0
    ) -> tuple[str, ...]:
        """Returns a sentence for each gate that is not passed.

        Args:
            upper: Upper bound of the loss difference, nats/token.
            kl: Mean KL, nats/token.
            top1: Share of tokens with the same likeliest token.
            lost: Needles that stock attention finds and the plan does not.
            won: Needles that the plan finds and stock attention does not.
            found: Needles that stock attention finds.
            kl_p999: 99.9th percentile of the KL, nats.
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
        if not kl_p999 <= self.kl_p999:
            reasons.append(f"the 99.9th percentile of the KL is {kl_p999:.2e} nats, above {self.kl_p999:.2e}")
        allowed = math.ceil((NEEDLES if self.needles is None else self.needles) * found)
        chance = float(stats.binom.sf(lost - 1, lost + won, 0.5)) if lost else 1.0
        if lost - won > allowed and (self.needles is not None or chance <= SIGNIFICANT):
            reasons.append(f"{lost - won} of {found} needles are lost, more than {allowed}")
        return tuple(reasons)

    def nearest(self, upper: float, kl: float, top1: float, kl_p999: float) -> tuple[str, float]:
        """Returns the gate that came nearest to its limit, and the share of the limit that was reached."""
        shares = {
            "the bound of the loss": upper / self.budget,
            "the mean KL": kl / self.budget,
            "the likeliest token": (1.0 - top1) / (1.0 - self.top1) if self.top1 < 1.0 else math.inf,
            "the KL's 99.9th percentile": kl_p999 / self.kl_p999,
        }
        name = max(shares, key=lambda one: shares[one])
        return name, shares[name]
