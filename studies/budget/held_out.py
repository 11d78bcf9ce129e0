"""What the plans of a measurement lose on held-out text, which proves nothing, and save by the price table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from adaattn_hf.calibration import pricing, verify
from adaattn_hf.calibration.measure import Measurement
from adaattn_hf.calibration.search import JointPasses, Picks, programs
from adaattn_hf.calibration.verify import Evidence
from adaattn_hf.plans.choices import Choice
from adaattn_hf.policy.knapsack import shared_prices

from .study import remembering


def scores(evidence: Evidence) -> dict[str, float]:
    """Returns means per token and the one-sided bound at 95 % of the loss, in nats/token."""
    bound = evidence.bound(0.95)
    top1 = evidence.agree / bound.tokens
    return {"delta_nll": bound.mean, "upper": bound.upper, "kl": evidence.mean_kl(), "top1": top1}


def ratio(measurement: Measurement, picks: Picks, length: int) -> float:
    """Returns how many times as fast as exact attention the prefill of an allocation is, by the price table."""
    layers, none = measurement.layers, np.zeros_like(picks)
    prices, launches = pricing.unit_prices(
        measurement.table, layers.candidates.choices, layers.units,
        lengths=[length], decode_tokens=0, windows={}, kinds=layers.kinds,
    )  # fmt: skip
    exact, own = (float(shared_prices(one, prices, launches).sum()) for one in (none, picks))
    return exact / own


@dataclass(eq=False)
class HeldOutPasses(JointPasses):
    """Measures whole plans on calibration text and on held-out text, keeping the hidden states of exact attention."""

    def __post_init__(self) -> None:
        remembering(self.measurement.inputs.arms)

    def held_out(self, picks: Picks, length: int) -> dict[str, float]:
        """Returns the loss of an allocation on the sequences of a first look at a length, and its price ratio there."""
        inputs = self.measurement.inputs
        sequences = inputs.samples[length].held_out[: inputs.settings.held_out]
        plan = programs(self.measurement, picks)
        evidence = verify.gather(inputs.arms, plan, sequences, scoring=inputs.scoring)
        return {**scores(evidence), "ratio": ratio(self.measurement, picks, length)}

    def evaluate(self, picks: Picks) -> dict[str, float]:
        """Returns predicted and measured loss and the price ratio of an allocation at the longest length."""
        units = np.arange(len(self.measurement.layers.units))
        risk = float(self.measurement.risks()[-1, units, picks].sum())
        longest = self.measurement.inputs.settings.lengths[-1]
        return {"predicted": risk, **self.held_out(picks, longest)}

    def uniform(self, choice: Choice) -> dict[str, float]:
        """Returns the same for one choice in every unit."""
        layers = self.measurement.layers
        return self.evaluate(np.full(len(layers.units), layers.candidates.choices.index(choice)))
