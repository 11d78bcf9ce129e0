"""What the plans of a measurement lose on held-out text, which proves nothing, and save by the price table."""

from __future__ import annotations

import numpy as np

from adaattn_hf.calibration.layers import Measurement, Picks, unit_prices
from adaattn_hf.calibration.proof import Evidence
from adaattn_hf.policy.knapsack import shared_prices


def scores(evidence: Evidence) -> dict[str, float]:
    """Returns means per token and the one-sided bound at 95 % of the loss, in nats/token."""
    worst, top1 = evidence.worst(0.95), evidence.agree / sum(evidence.tokens)
    return {"delta_nll": worst.mean, "upper": worst.upper(0.95), "kl": float(evidence.kl.mean()), "top1": top1}


def ratio(measurement: Measurement, picks: Picks, length: int) -> float:
    """Returns how many times as fast as exact attention the prefill of an allocation is, by the price table."""
    prices, launches = unit_prices(measurement.table, measurement.layers, [length], "prefill")
    none = np.zeros_like(picks)
    exact, own = (float(shared_prices(one, prices, launches).sum()) for one in (none, picks))
    return exact / own
