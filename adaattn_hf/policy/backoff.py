"""What to do after a failed proof: aim at less of the budget, and take back what cost most.

A plan that failed by its loss has taught the law of the loss, so that the next aims lower anyway; a plan that failed
by another gate has not, and is made smaller in earnest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Caution:
    """What failed plans left behind.

    Attributes:
        share: Share of the aim that the next plan may take.
        demoted: Units forced to be exact.
    """

    share: float = 1.0
    demoted: tuple[int, ...] = ()

    def failed(self, losses: NDArray[np.float64], *, of_loss: bool, count: int = 3) -> Caution:
        """Returns the caution after a failure.

        Args:
            losses: `[units]`, marginal loss of each unit in the failed plan, 0 for exact units.
            of_loss: Whether the bound of the loss was what failed; otherwise the `count` units of the largest
                loss are demoted, too.
            count: Units to demote.
        """
        if of_loss:
            return Caution(0.9 * self.share, self.demoted)
        order = np.argsort(-losses, kind="stable")
        worst = [int(unit) for unit in order[:count] if losses[unit] > 0]
        return Caution(0.6 * self.share, tuple(sorted({*self.demoted, *worst})))
