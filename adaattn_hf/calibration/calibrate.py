"""From a loss budget to a verified plan, in four steps.

* measure: estimate the risk of every choice for every unit (a key/value head of a layer) from a few backward passes on
  sampled rows (`measure`, `fisher`)
* price: time the launches on this machine (`pricing`)
* choose: solve a multiple-choice knapsack within shares of the budget, from safe to bold, and measure each plan on
  calibration text (`ladder`, `policy.knapsack`)
* verify: judge these candidates in their order, all by the same held-out text and each at the full level, until one
  fails; the last that passed is the plan (`proof`)

The order is fixed before held-out text is read. So only the first candidate that breaks the budget can let a false one
through, and the error rate of all is that of one test: fixed-sequence testing (Maurer, Hothorn and Lehmacher 1995), in
the words of "Learn then Test" (Angelopoulos et al. 2021, arXiv 2110.01052) for limits on any loss.

All randomness comes from one seed, so that with prices from a file the plan is the same byte for byte. Prices measured
again differ in the last digits, which may decide between two choices of nearly equal price.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ..plans.limits import Gates, most_rounding, unproven
from ..plans.plan import Plan
from ..plans.wording import allowed, at_most, in_nats, rise
from ..policy.knapsack import evaluate
from .assemble import finished_plan, report
from .inputs import OutOfTime
from .ladder import Candidate, Ladder, falling, ladder
from .layers import Measurement, bound_layers, picks_of
from .passes import StockDistance, stock_distance, whole_forward
from .proof import Proof, prove, worst
from .search import PROTOCOL, JointPasses, Rounding, Way, roundings, storages
from .settings import Calibration, CalibrationSettings

APART = 0.1
"""The distance of two stock implementations is said if it is more than this share of the budget."""


def decided(measurement: Measurement, budget: float | None = None, proven: Sequence[Plan] = ()) -> Calibration:
    """Returns the plan of a budget in nats/token, that of the settings if absent, and times whole passes of it.

    Each budget has the error rate of its settings, and k of them are all kept with at least 1 - k alpha. Plans that
    were `proven` before come first where they were proven on the same text.
    """
    inputs = measurement.inputs
    result = choose_and_verify(measurement, replace(inputs.settings, budget=budget or inputs.settings.budget), proven)
    if inputs.pace is not None:
        inputs.run.expect({"plans": 0.0, "speed": inputs.pace.speed(inputs.settings) * result.met})
    if result.met and inputs.settings.rounds and inputs.team.leads:
        by_layer = bound_layers(measurement, picks_of(measurement, result.plan))
        try:
            timed = whole_forward(inputs, by_layer, inputs.settings.rounds)
            result.report["whole_forward"] = [asdict(one) for one in timed]
        except OutOfTime as over:
            inputs.run.say(f"whole passes are not timed: {over}")
        except torch.OutOfMemoryError:  # the plan is verified, and stays
            inputs.run.say(
                f"whole passes of {inputs.settings.batch} sequences have no room to be timed; a smaller "
                "--batch-size would fit"
            )
    return result


def choose_and_verify(
    measurement: Measurement, settings: CalibrationSettings | None = None, proven: Sequence[Plan] = ()
) -> Calibration:
    """Returns the boldest plan that passed verification, or the exact plan.

    `settings` may have another budget or verification than those of the measurement.
    """
    if settings is not None:
        measurement = replace(measurement, inputs=measurement.inputs.with_settings(settings))
    stock = stock_distance(measurement.inputs)
    s, dtype = measurement.inputs.settings, measurement.layers.exact.dtype
    rounding = min(stock.kl, most_rounding(dtype))
    gates = Gates(s.budget, s.top1, s.needles_lost, rounding, max_kl=s.max_kl)
    if stock.kl > APART * s.budget:
        measurement.inputs.run.say(
            f"two stock implementations differ by a KL of {in_nats(stock.kl)} nats/token in this dtype, which is not "
            "held against a plan"
        )
    return Sequential(JointPasses(measurement, stock.kl), stock).result(gates, proven)


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a sequence of candidates came to: the last that passed, with its proof, and why none followed, in words."""

    gates: Gates
    passed: tuple[Candidate, Proof] | None
    reason: str


@dataclass(frozen=True, eq=False)
class Sequential:
    """Judges candidates in a fixed sequence; `stock` is how far two exact implementations lie apart, `log` a report."""

    passes: JointPasses
    stock: StockDistance
    log: list[dict[str, Any]] = field(default_factory=list)

    @property
    def measurement(self) -> Measurement:
        """The model, its text, risks and prices."""
        return self.passes.measurement

    def outcome(self, gates: Gates, proven: Sequence[Plan]) -> Outcome:
        """Returns what held-out text says of plans that were proven on it before, and of bolder ones after them."""
        inputs, s = self.measurement.inputs, self.measurement.inputs.settings
        passed: tuple[Candidate, Proof] | None = None
        try:
            formats = roundings(self.passes) if s.with_cache else []
            steps = ladder(self.passes, formats, gates, self.stock, self.log)
            gates, known = steps.gates, self.known(proven, formats)
            order = falling([*known, *steps.candidates])
            for number, candidate in enumerate(order, 1):
                self.expect(len(order) - number + 1)
                proof = prove(self.measurement, candidate.way, candidate.predicted, gates, number)
                self.log.append({"verified": asdict(proof.worst), "candidate": number, "of": len(order)})
                before = "" if candidate.budget is None else f", proven for {allowed(candidate.budget)}"
                figures = f"perplexity {rise(proof.worst.delta_nll)}, at most {at_most(proof.worst.upper)}: passed"
                said = figures if proof.passed else proof.worst.sentence
                inputs.run.say(f"candidate {number} of {len(order)}{before}: {said}")
                if not proof.passed:
                    return Outcome(gates, passed, f"the first candidate {proof.worst.sentence}; {proof.remedy(gates)}")
                passed = candidate, proof
        except OutOfTime as over:
            return Outcome(gates, passed, str(over))
        return Outcome(gates, passed, "" if passed else self.nothing(steps))

    def known(self, proven: Sequence[Plan], formats: Sequence[Rounding]) -> list[Candidate]:
        """Returns the candidates of plans that were proven on this held-out text for a smaller budget, smallest first.

        Theirs are these weights, lengths and text, and choices that are priced here.
        """
        inputs, layers, s = self.measurement.inputs, self.measurement.layers, self.measurement.inputs.settings
        found = []
        for plan in sorted(proven, key=lambda one: one.budget):
            drawn = {"seed": plan.seed, **plan.protocol.get("settings", {})}
            same = (
                (plan.weight_hash, plan.dtype, plan.lengths, plan.data_fingerprint)
                == (layers.exact.weight_hash, layers.exact.dtype, s.lengths, inputs.fingerprint)
                and all(drawn.get(name) == getattr(s, name) for name in ("seed", "sequences", "joint"))
                and (plan.cache is not None) == s.with_cache
                and {choice for layer in plan.layers for choice in layer.choices} <= {*layers.candidates.choices}
            )
            if same and plan.budget < s.budget and unproven(plan) is None:
                found.append(self.again(plan, formats))
        return found

    def again(self, plan: Plan, formats: Sequence[Rounding]) -> Candidate:
        """Returns the candidate of a plan that was made before."""
        measurement, picks = self.measurement, picks_of(self.measurement, plan)
        way = Way(evaluate(picks, measurement.prices, measurement.risks(), measurement.launches))
        if plan.cache is not None:
            beside = {one.stored: one.kl for one in formats}.get(plan.cache[0], {})
            way = replace(way, storage=storages(measurement, picks)[plan.cache[0]], beside=beside)
        return Candidate.measured(self.passes, way, np.ones(len(plan.lengths)), plan.budget)

    def expect(self, left: int) -> None:
        """Tells how long the candidates that are left will take."""
        inputs, s = self.measurement.inputs, self.measurement.inputs.settings
        if inputs.pace is not None:
            stages = inputs.pace.plan(s, inputs.team.size, 1)
            further = (left - 1) * sum(stages.values()) + inputs.pace.speed(s)
            inputs.run.expect({**stages, "plans": further})

    def nothing(self, steps: Ladder) -> str:
        """Returns in words why there was no candidate, and what would change it."""
        s = self.measurement.inputs.settings
        if steps.forgetful:
            return "no candidate saves and keeps the needles in the calibration text; --needles allows more to be lost"
        if s.kv_bytes is not None:
            costs = [step["cost"] for step in self.log if "cost" in step]
            least = f"the smallest that is foretold within it takes {min(costs):.2f}x" if costs else "none is smaller"
            return (
                f"kv_bytes: {s.kv_bytes:g}x of the bytes is not reached by any format with windows, {least}; ask for "
                "that, for a larger budget, or for longer --lengths"
            )
        saves = "memory" if s.with_cache else "time"
        return (
            f"no candidate saves {saves} on this machine; longer --lengths (now {s.lengths[-1]}) or a larger budget "
            "would change that"
        )

    def result(self, gates: Gates, proven: Sequence[Plan]) -> Calibration:
        """Returns the plan that passed, or the exact one with the reason, and the format of the cache."""
        measurement, out = self.measurement, self.outcome(gates, proven)
        if out.passed is None:
            zero = np.zeros(len(measurement.layers.units), dtype=np.int64)
            one = np.ones(len(measurement.inputs.settings.lengths))
            sentence = f"the budget of {allowed(gates.budget)} cannot be met: {out.reason}; the plan is exact"
            verdicts = [step["verified"] for step in self.log if "verified" in step]
            plan = finished_plan(measurement, zero, None, one, out.gates)
            noted = report(measurement, self.log, None, one, verdicts)
            return Calibration(plan, False, sentence, {**noted, "rounding": self.stock.kl})
        candidate, proof = out.passed
        allocation, storage = candidate.way.allocation, candidate.way.storage
        verdict = worst(proof.alone.values()) if proof.alone else None
        plan = finished_plan(measurement, allocation.picks, verdict, candidate.alpha, out.gates)
        noted = report(measurement, self.log, allocation, candidate.alpha, [asdict(one) for one in proof.verdicts])
        noted["rounding"] = self.stock.kl  # every measured KL holds that of rounding
        sentence = proof.worst.sentence
        if storage is not None:
            coded = worst(proof.coded.values()) if proof.coded else None
            stored = {**asdict(storage), "verified": None if coded is None else asdict(coded)}
            plan = replace(plan, protocol={**plan.protocol, PROTOCOL: stored})
            words = ", as exact as the plan" if coded is None else f" {coded.sentence}"
            noted[PROTOCOL] = f"cache: {storage.words}{words}"
            sentence = f"{sentence}; {noted[PROTOCOL]}"
        return Calibration(plan, True, sentence, noted)
