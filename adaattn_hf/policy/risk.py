"""Accumulates the risk of every (unit, choice): its predicted loss in nats/token, over a stream of sampled rows.

For small perturbations the mean loss difference equals the mean KL, and with labels drawn from the model
itself E[KL] = 1/2 E[(g . do)^2], where g is the gradient of the sampled log-likelihood with respect to the
attention output and do the change of that output (a diagonal Fisher form). Risks of units add up; a measured
joint KL rescales the sum.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass
class RiskTable:
    """Running sums of risk per unit and choice of one length bin.

    Attributes:
        units: Number of (layer, key/value head) pairs.
        choices: Number of choices.
        total: `[units, choices]`, sum of 1/2 (g . do)^2 over sampled rows.
        squares: `[units, choices]`, sum over sequences of the squared mean, for the standard error.
        means: `[units, choices]`, sum over sequences of the mean.
        rows: Sampled rows summed.
        sequences: Sequences summed.
    """

    units: int
    choices: int
    total: Array = field(init=False)
    squares: Array = field(init=False)
    means: Array = field(init=False)
    rows: int = 0
    sequences: int = 0

    def __post_init__(self) -> None:
        shape = (self.units, self.choices)
        self.total, self.squares, self.means = np.zeros(shape), np.zeros(shape), np.zeros(shape)

    def add(self, summed: Array, rows: int) -> None:
        """Adds the sums `[units, choices]` of one sequence over `rows` sampled rows.

        Raises:
            ValueError: If the shape is another, a sum is negative or not finite, or no row was sampled.
        """
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
        self.means += summed / rows
        self.squares += (summed / rows) ** 2
        self.rows += rows
        self.sequences += 1

    def mean(self) -> Array:
        """Returns the risk `[units, choices]` in nats/token.

        Raises:
            ValueError: If nothing was added.
        """
        if self.rows == 0:
            raise ValueError("the risk table is empty; expected at least one calibrated sequence")
        return np.asarray(self.total / self.rows)

    def standard_error(self) -> Array:
        """Returns the standard error over sequences `[units, choices]`, infinite with fewer than two."""
        if self.sequences < 2:
            return np.full_like(self.total, np.inf)
        mean = self.means / self.sequences
        variance = np.maximum(self.squares / self.sequences - mean**2, 0.0)
        return np.asarray(np.sqrt(variance / (self.sequences - 1)))


def corrected(fisher: Array, fisher_error: Array, direct: Array, direct_error: Array) -> tuple[Array, float]:
    """Returns Fisher risks corrected by directly measured KL, and the common factor by which they were off.

    A random-effects model (DerSimonian and Laird) of log(KL / risk), as both errors are relative: its mean is the
    median over the pairs, and its variance between pairs is what sampling errors do not explain. Each pair is then
    shrunk from its Fisher estimate towards its measured value, the more, the less noisy the measurement is.

    Args:
        fisher: `[pairs]`, estimated risk, nats/token; 0 where the choice changes nothing, which is kept.
        fisher_error: `[pairs]`, standard error of `fisher`, infinite where unknown.
        direct: `[pairs]`, measured KL, nats/token.
        direct_error: `[pairs]`, standard error of `direct`.
    """
    risk, risky = fisher.copy(), fisher > 0.0
    if not risky.any():
        return risk, 1.0
    estimate, error, kl, kl_error = (values[risky] for values in (fisher, fisher_error, direct, direct_error))
    # a KL of 0 would get infinite weight in log space
    kl = np.maximum(kl, 1e-3 * estimate)
    offset = np.log(kl / estimate)
    common = float(np.median(offset))
    has_error = np.isfinite(error)
    sampling, noise = np.where(has_error, error / estimate, 0.0) ** 2, (kl_error / kl) ** 2
    spread = sampling + max(float(np.mean((offset - common) ** 2) - np.mean(sampling + noise)), 0.0)
    total = spread + noise
    weight = np.where(has_error & (total > 0.0), spread / np.where(total > 0.0, total, 1.0), 1.0)
    risk[risky] = estimate * np.exp(common + weight * (offset - common))
    return risk, float(np.exp(common))


def rescale(alpha: float, predicted: float, measured: float) -> float:
    """Returns the updated risk factor, from the predicted and the measured joint KL of one plan.

    Args:
        alpha: The present factor, which `predicted` contains.
        predicted: Sum of the rescaled risks, nats/token.
        measured: Joint KL of the plan, nats/token.
    """
    if predicted <= 0.0 or measured <= 0.0:
        return alpha
    return float(alpha * (measured / predicted))
