"""Back-off after a failed proof: target a smaller share of the budget, and make the costliest units exact again.

A failure by loss has updated the loss law, which lowers the next target already; a failure by another gate has not,
so the target is lowered further and the units with the largest loss are made exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DEMOTED = 3
"""Units that a failure by another gate makes exact."""


@dataclass(frozen=True)
class Caution:
    """How far the next plan is held back, after the plans that failed.

    Attributes:
        share: Share of the target KL that the next plan may use.
        demoted: Units forced to be exact.
    """

    share: float = 1.0
    demoted: tuple[int, ...] = ()

    def failed(self, losses: NDArray[np.float64], *, of_loss: bool) -> Caution:
        """Returns the state after one more failure.

        Args:
            losses: `[units]`, marginal loss of each unit in the failed plan, 0 for exact units.
            of_loss: Whether the bound of the loss failed; otherwise the units with the largest loss become exact, too.
        """
        if of_loss:
            return Caution(0.9 * self.share, self.demoted)
        order = np.argsort(-losses, kind="stable")
        worst = [int(unit) for unit in order[:DEMOTED] if losses[unit] > 0]
        return Caution(0.6 * self.share, tuple(sorted({*self.demoted, *worst})))
