"""Decides whether a plan passes: a one-sided non-inferiority test on paired, clustered losses, and further limits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from ..plans import wording
from ..plans.wording import at_most, in_nats, share

DOCUMENTS = 8
"""Documents of one size whose spread tells an error; where there are fewer, chunks of text are taken as independent."""


def clustered(
    names: Sequence[str], sums: Sequence[float], tokens: Sequence[int]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Returns sums and tokens per document, or per chunk of text where documents count for fewer than `DOCUMENTS`.

    They count for as many of one size as (sum of chunks)^2 / sum of squares (Kish 1965, "Survey Sampling"): one book
    with a few pages is one document, whose spread nobody knows.
    """
    chunks = np.array(list(Counter(names).values()))
    enough = chunks.sum() ** 2 >= DOCUMENTS * np.square(chunks).sum()
    keys = list(names) if enough else [str(index) for index in range(len(names))]
    order = {key: cluster for cluster, key in enumerate(dict.fromkeys(keys))}
    clusters = [order[key] for key in keys]
    grouped = np.asarray(np.bincount(clusters, sums), dtype=np.float64)
    return grouped, np.bincount(clusters, tokens).astype(np.int64)


SLACK = 1.5
"""Tolerated top-1 flips, as a multiple of those that the model's loss law predicts at the budget."""
SIGNIFICANT = 0.05
"""Significance level of the sign test on lost needles."""
NEEDLES = 0.02
"""Largest net share of the needles retrieved by stock attention that may be lost."""


@dataclass(frozen=True)
class Gates:
    """Limits that a plan must keep.

    The budget limits the loss. Unless the user sets them, the other limits follow from it: the share of tokens whose
    top-1 prediction flips grows with the square root of the KL, by a factor measured on this model, and is never held
    below that between two stock implementations.

    Attributes:
        budget: Upper bound of the loss difference, nats/token; the mean KL keeps it too, beyond what rounding adds.
        top1: Smallest share of tokens with the same top-1 prediction.
        needles: Largest net share of stock attention's needles that may be lost. `None`: `NEEDLES`, and a larger loss
            fails only where chance does not explain it.
        rounding: Mean KL between two stock implementations in the model's dtype, nats/token.
    """

    budget: float
    top1: float = 0.0
    needles: float | None = None
    rounding: float = 0.0

    def with_flips(self, per_root_kl: float, stock: float) -> Gates:
        """Returns the gates with a limit on top-1 flips where the user set none.

        Args:
            per_root_kl: Flips per token divided by the square root of the KL, measured on this model.
            stock: Flips per token between two stock implementations in the model's dtype.
        """
        if self.top1 > 0.0:
            return self
        return replace(self, top1=1.0 - max(SLACK * per_root_kl * math.sqrt(self.most_kl), stock))

    @property
    def most_kl(self) -> float:
        """Largest mean KL, nats/token."""
        return self.budget + self.rounding

    def failures(self, upper: float, kl: float, top1: float, lost: int, won: int, retrieved: int) -> tuple[str, ...]:
        """Returns a sentence for each gate that is not passed.

        Args:
            upper: Upper bound of the loss difference, nats/token.
            kl: Mean KL, nats/token.
            top1: Share of tokens with the same top-1 prediction.
            lost, won: Needles that only stock attention retrieves, and those that only the plan does.
            retrieved: Needles that stock attention retrieves.
        """
        reasons = []
        if not upper <= self.budget:
            reasons.append(
                f"the perplexity may rise by {at_most(upper)}, {wording.allowed(self.budget)} is allowed (the upper "
                f"bound of Δnll is {in_nats(upper)} nats/token, above {in_nats(self.budget)})"
            )
        if not kl <= self.most_kl:
            reasons.append(
                f"predictions differ too much (mean KL {in_nats(kl)} nats/token, above {in_nats(self.most_kl)})"
            )
        return (*reasons, *self.beside_the_loss(top1, lost, won, retrieved))

    def beside_the_loss(self, top1: float, lost: int, won: int, retrieved: int) -> tuple[str, ...]:
        """Returns those of `failures` that a larger budget would not have prevented."""
        reasons = []
        if not top1 >= self.top1:
            reasons.append(f"the likeliest token agrees on {share(top1, 2)}, below {share(self.top1, 2)}")
        if self.forgets(lost, won, retrieved):
            reasons.append(f"{lost - won} of {retrieved} needles are lost, more than {self.spared(retrieved)}")
        return tuple(reasons)

    def spared(self, retrieved: int) -> int:
        """Returns how many of the needles that stock attention retrieves may be lost."""
        return math.ceil((NEEDLES if self.needles is None else self.needles) * retrieved)

    def forgets(self, lost: int, won: int, retrieved: int, level: float = SIGNIFICANT) -> bool:
        """Whether too many needles are lost; where the user set no limit, more than chance explains at a level."""
        chance = float(stats.binom.sf(lost - 1, lost + won, 0.5)) if lost else 1.0
        return lost - won > self.spared(retrieved) and (self.needles is not None or chance <= level)

    def nearest(self, upper: float, kl: float, top1: float) -> tuple[str, float]:
        """Returns the name of the gate nearest to its limit, and which share of the limit was used."""
        shares = {
            "the bound of the increase": upper / self.budget,
            "the mean KL": kl / self.most_kl,
            "the likeliest token": (1.0 - top1) / (1.0 - self.top1) if self.top1 < 1.0 else math.inf,
        }
        name = max(shares, key=shares.__getitem__)
        return name, shares[name]
