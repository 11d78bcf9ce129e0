"""Accumulates the risk of every (unit, choice): its predicted loss in nats/token, over a stream of sampled rows.

For small perturbations the mean loss difference equals the mean KL, and with labels drawn from the model
itself E[KL] = 1/2 E[(g . do)^2], where g is the gradient of the sampled log-likelihood with respect to the
attention output and do the change of that output (a diagonal Fisher form). Risks of units add up; a measured
joint KL rescales the sum.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class RiskTable:
    """Running sums of risk per unit and choice of one length bin.

    `total` `[units, choices]` is the sum of 1/2 (g . do)^2 over the sampled `rows`.
    """

    def __init__(self, units: int, choices: int) -> None:
        self.total, self.rows = np.zeros((units, choices)), 0

    def add(self, summed: Array, rows: int) -> None:
        """Adds the sums `[units, choices]` of one sequence over `rows` sampled rows; finite, and at least 0."""
        if summed.shape != self.total.shape:
            raise ValueError(f"summed has shape {summed.shape}, expected {self.total.shape}")
        if rows < 1:
            raise ValueError(f"rows is {rows}, expected at least 1")
        if not np.isfinite(summed).all() or (summed < 0).any():
            raise ValueError(
                "summed holds a negative or non-finite risk, expected finite ones: the model's losses or gradients are "
                "not finite on this text; load it in bfloat16 or float32"
            )
        self.total += summed
        self.rows += rows

    def mean(self) -> Array:
        """Returns the risk `[units, choices]` in nats/token; a ValueError if nothing was added."""
        if self.rows == 0:
            raise ValueError("the risk table is empty; expected at least one calibrated sequence")
        return np.asarray(self.total / self.rows)


def rescale(alpha: float, predicted: float, measured: float) -> float:
    """Returns the risk factor, updated from the predicted and the measured joint KL of one plan, nats/token.

    `predicted` contains the present factor.
    """
    if predicted <= 0.0 or measured <= 0.0:
        return alpha
    return float(alpha * (measured / predicted))
