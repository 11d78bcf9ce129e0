"""What to do when a plan fails verification: spend less of the budget, and take back what cost most.

Every failed try shrinks the share of the budget by 0.6 and demotes the three units with the largest measured
or predicted loss. A share too small to matter means that the budget cannot be met and the plan is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Backoff:
    """State of the search for a plan that passes.

    Attributes:
        share: Share of the budget that the knapsack may spend.
        tries: Verifications done.
        demoted: Units forced to be exact.
        limit: Tries after which the plan is exact.
    """

    share: float = 0.7
    tries: int = 0
    demoted: tuple[int, ...] = ()
    limit: int = 4

    @property
    def exhausted(self) -> bool:
        """Whether nothing but the exact plan is left."""
        return self.tries >= self.limit

    def failed(self, losses: NDArray[np.float64], count: int = 3) -> Backoff:
        """Returns the next state, with the `count` units of the largest positive loss demoted.

        Args:
            losses: `[units]`, marginal loss of each unit in the failed plan, 0 for exact units.
            count: Units to demote.
        """
        order = np.argsort(-losses, kind="stable")
        worst = [int(unit) for unit in order[:count] if losses[unit] > 0]
        demoted = tuple(sorted({*self.demoted, *worst}))
        return Backoff(self.share * 0.6, self.tries + 1, demoted, self.limit)


def adjusted_alpha(alpha: float, tries: int) -> float:
    """Returns the level of the next test when `tries` fresh shards may be looked at in all (Bonferroni).

    Raises:
        ValueError: If `alpha` is not in (0, 1), or `tries` is below one.
    """
    if not 0.0 < alpha < 1.0 or tries < 1:
        raise ValueError(f"alpha is {alpha} and tries {tries}, expected a level in (0, 1) and at least 1 try")
    return alpha / tries
