"""Searches and verifies plans one after another, until one that uses up the budget has passed.

Each plan is chosen so that its predicted upper bound just meets the budget. The prediction is fitted to the losses of
whole plans on calibration text and of earlier plans on held-out text. Each plan is verified on held-out text of its own
(`policy.sequential` controls the error rate). After a plan that passes with room to spare a bolder one follows, after a
failure a smaller one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from ..plans.limits import SIGNIFICANT, Gates, most_rounding
from ..plans.plan import Verified
from ..plans.wording import allowed, in_nats, share
from ..policy.aim import LossLaw, Observation
from ..policy.knapsack import Allocation
from ..policy.sequential import Attempts
from .assemble import finished_plan, report
from .inputs import OutOfTime
from .measure import Measurement
from .needles import compared
from .pace import PLANS
from .proof import Proof, Test, prove
from .search import REHEARSED, Aim, Found, Joint, JointPasses, Picks, seek
from .settings import Calibration
from .stock import stock_distance
from .storage import PROTOCOL, Rounding, aimed_at, choose_storage, roundings

SHARE = 0.9
"""Share of the budget at which predicted bounds are aimed."""
ROOM = 0.75
"""A bolder plan follows if the bound took less than this share of the budget."""
BOLDER = 0.995
"""A bolder plan takes at most this share of the time of the one that passed: what one head saves in a small model."""
DRIFT = 0.5
"""Additional standard error of the loss per KL for text of another source that has not been looked at yet."""
APART = 0.1
"""The distance of two stock implementations is said if it is more than this share of the budget."""
AFTER_LOSS, AFTER_OTHERS = 0.9, 0.6
"""Share of its target that the next plan has: after a failure by loss, which has taught the law of the loss, too, and
by another limit."""
CERTAIN = 0.5
"""It is said where the uncertainty of held-out text leaves less than this share of the budget."""
CLOSER = (0.25, 0.5)
"""A plan that loses needles is followed by one with at least and at most so much of its risk for retrieval."""
HALVED = 0.5
"""Where windows with a cache's format have failed, so much of their KL is tried next, if laws afford no more."""


class Campaign:
    """Searches and verifies plans one after another, each chosen with what the earlier ones showed."""

    def __init__(self, measurement: Measurement) -> None:
        inputs = measurement.inputs
        s = inputs.settings
        self.stock = stock_distance(inputs)
        self.measurement, self.passes = measurement, JointPasses(measurement, self.stock.kl)
        # where a smaller cache is wanted, formats are tested without a plan if every plan fails
        self.attempts = Attempts(s.alpha, s.tries, s.bolder, reserved=int(s.with_cache))
        self.none: Picks = np.zeros(len(measurement.layers.units), dtype=np.int64)
        self.alpha = np.ones(len(s.lengths))
        self.share = SHARE
        self.needles: dict[int, float] = {}
        self.history: list[dict[str, Any]] = []
        self.used = 0
        self.looked_at: dict[str, list[int]] = {}
        self.plans = 0
        self.shards: dict[int, list[list[Observation]]] = {length: [] for length in s.lengths}
        self.roundings: list[Rounding] = []
        self.format: Rounding | None = None
        self.least: dict[int, float] = {}
        self.proved: Verified | str | None = None
        self.joint: dict[int, list[Joint]] = {length: [] for length in s.lengths}
        self.gates = Gates(
            s.budget, s.top1, s.needles_lost, min(self.stock.kl, most_rounding(measurement.layers.bound.dtype))
        )

    def run(self) -> Calibration:
        """Returns the calibration's result."""
        inputs = self.measurement.inputs
        passed: tuple[Found, Proof] | None = None
        alone: tuple[Found, Proof] | None = None
        saves = "memory" if inputs.settings.with_cache else "time"
        sentence = f"no choice saves {saves} inside the budget on this machine"
        for words in self.remarks():
            inputs.say(words)
        try:
            if inputs.settings.with_cache:
                self.choose_format()
            while not self.attempts.exhausted:
                inputs.refuse_late()
                most = self.most()
                if most < max(min(inputs.settings.held_out, self.pool()), 2 * inputs.sources):
                    sentence = f"{sentence}; the held-out text is used up: give more of it"
                    break
                aim = self.aim(most)
                if inputs.team.tell(self.expect(aim)) > inputs.left and passed:
                    break  # a further plan would not be verified in time
                found, self.alpha = seek(self.passes, aim, self.alpha, self.history, self.updated)
                if found is None or (passed and found.allocation.price > BOLDER * passed[0].allocation.price):
                    if self.needles and not self.plans:
                        sentence += " and keeps the needles in the calibration text; --needles allows more to be lost"
                    break
                proof, coded = self.prove(found)
                worst = (coded or proof).worst
                # the last `verified` entry belongs to the plan that is returned
                kind = "bolder" if passed and not worst.passed else "verified"
                self.history.append({kind: asdict(worst), "held_out": self.looked_at})
                if worst.passed:
                    passed, self.proved = (found, proof), worst if coded else None
                    further = self.attempts.advanced() if worst.upper < ROOM * self.gates.budget else None
                else:
                    sentence = worst.sentence
                    if alone is None and passed is None and proof.passed:  # the fallback
                        alone, self.proved = (found, proof), f"beside the plan {sentence}"
                    self.attempts = self.attempts.failed()
                    further = self.attempts.advanced() if passed else self.attempts
                    if inputs.settings.with_cache:
                        self.least = {length: HALVED * one.added for length, one in found.joint.items()}
                    others = (coded or proof).lost or worst.upper <= self.gates.budget
                    self.share *= AFTER_OTHERS if others else AFTER_LOSS
                if further is None:
                    break
                self.attempts = further
        except OutOfTime as over:
            sentence = f"{sentence}; {over}" if self.history else str(over)
        passed = passed or alone
        result = self.exact(sentence) if passed is None else self.finished(*passed)
        if not inputs.settings.with_cache:
            return result
        return self.with_cache(result, self.none if passed is None else passed[0].allocation.picks)

    def choose_format(self) -> None:
        """Measures the loss of each cache format, and chooses the one that plans are combined with."""
        measurement, lengths = self.measurement, self.measurement.inputs.settings.lengths
        self.roundings = roundings(self.passes)
        aim = self.aim(max(self.most(), 2))
        afforded = np.array([aim.affordable(length) for length in lengths])
        self.format = aimed_at(measurement, self.roundings, afforded)
        costs = [f"{one.stored} costs a KL of {in_nats(max(one.kl.values()))}" for one in self.roundings]
        measurement.inputs.say(
            f"cache: {', '.join(costs)} nats/token; windows are sought beside "
            f"{'numbers' if self.format is None else self.format.stored}"
        )

    def known(self, planned: bool) -> dict[str, Verified | str]:
        """Returns a verdict on each format, or why it is not tested; `planned`: together with the plan found."""
        budget, beside = self.gates.budget, "numbers" if self.format is None else self.format.stored
        found: dict[str, Verified | str] = {}
        for one in self.roundings:
            kl = max(one.kl.values())
            if planned:
                found[one.stored] = (
                    f"it costs a KL of {in_nats(kl)} nats/token, and windows were sought beside {beside}"
                )
            elif kl > budget:
                found[one.stored] = f"it costs a KL of {in_nats(kl)} nats/token, above {in_nats(budget)}"
        if planned and self.format is not None and self.proved is not None:
            found[self.format.stored] = self.proved
        return found

    def with_cache(self, result: Calibration, picks: Picks) -> Calibration:
        """Returns the result with the verified cache format, not met if `kv_bytes` is not reached."""
        left, known = self.attempts.left, self.known(bool(picks.any()))
        found, words = choose_storage(self.measurement, picks, self.current.gates, left, self.used, known)
        sentence, report = f"{result.sentence}; {words}", {**result.report, PROTOCOL: words}
        if found is None:
            met = result.met and self.measurement.inputs.settings.kv_bytes is None
            return replace(result, met=met, sentence=sentence, report=report)
        plan = replace(result.plan, protocol={**result.plan.protocol, PROTOCOL: found})
        return replace(result, plan=plan, met=True, sentence=sentence, report=report)

    def pool(self) -> int:
        """Returns the number of held-out sequences, at the length with the fewest."""
        return min(len(sample.held_out) for sample in self.measurement.inputs.samples.values())

    def most(self) -> int:
        """Returns how many held-out sequences the next plan may use: half of the rest, so that another can follow."""
        s, left = self.measurement.inputs.settings, self.pool() - self.used
        return min(s.most_held_out, left if left < 2 * s.held_out else max(s.held_out, left // 2))

    def law(self, length: int, joints: Sequence[Joint]) -> LossLaw:
        """Returns the law of loss per KL at a length, fitted to the plans of a search and all held-out shards."""
        inputs = self.measurement.inputs
        beside = [] if self.format is None else [self.format.joint[length]]
        scored = float(sum(len(one.targets) for one in inputs.readings(inputs.samples[length].joint[0])))
        law = LossLaw.first_guess(scored, self.stock.kl).learned([one.observed for one in (*beside, *joints)])
        if inputs.other_source:
            law = replace(law, per_kl_error=math.hypot(law.per_kl_error, DRIFT))
        for shard in self.shards[length]:
            law = law.learned(shard)
        # each source is verified by its own sequences
        return replace(law, spread=law.spread * math.sqrt(inputs.sources))

    def aim(self, most: int) -> Aim:
        """Returns the aim of the next plan: how much held-out text to use, and the KL that it may have."""
        s = self.measurement.inputs.settings
        laws = {length: self.law(length, self.joint[length]) for length in s.lengths}
        first = min(s.held_out, most)
        beside = {} if self.format is None else self.format.kl
        limits, looks = (beside, self.least, self.needles), (first, most)
        self.current = Aim(laws, self.gates, self.attempts.level, self.share, looks, *limits)
        return self.current

    def updated(self, aim: Aim, length: int, joints: list[Joint]) -> Aim:
        """Returns the aim after plans were measured at a length, with the limit on flips of the likeliest token."""
        self.joint[length], last = joints, joints[-1]
        self.spare(length, last.risk, *last.needles, REHEARSED)
        flips = max(
            (one.flips / math.sqrt(one.kl) for many in self.joint.values() for one in many if one.kl > 0), default=0.0
        )
        gates = self.gates.with_flips(flips, self.stock.flips) if flips else self.gates
        self.current = replace(aim, laws={**aim.laws, length: self.law(length, joints)}, gates=gates)
        return self.current

    def spare(self, length: int, risk: float, lost: int, won: int, found: int, level: float) -> None:
        """Lowers the limit on the risk for retrieval where a plan of that risk has lost too many needles."""
        if self.gates.forgets(lost, won, found, level):
            closer = risk * float(np.clip(self.gates.spared(found) / (lost - won), *CLOSER))
            self.needles[length] = min(closer, self.needles.get(length, math.inf))

    def prove(self, found: Found) -> tuple[Proof, Proof | None]:
        """Verifies a plan on the next held-out text, alone and with the cache's format, and learns from the result.

        Both must pass on the same text, so each may be tested at the full level (an intersection-union test).
        """
        inputs = self.measurement.inputs
        self.plans += 1
        shards = {
            length: inputs.samples[length].held_out[self.used : self.used + self.current.sequences(length)]
            for length in inputs.settings.lengths
        }
        picks = found.allocation.picks
        test = Test(self.current.gates, self.attempts.level, self.plans, found.predicted)
        proof, coded = prove(self.measurement, picks, shards, test), None
        beside = {} if self.format is None else self.format.kl
        if proof.passed and self.format is not None:
            together = {length: kl + beside[length] for length, kl in found.predicted.items()}
            over = replace(test, predicted=together, stored=self.format.stored)
            coded = prove(self.measurement, picks, shards, over)
        self.looked_at = {
            str(length): [self.used, self.used + len(evidence.names)] for length, evidence in proof.evidence.items()
        }
        self.used += max(len(shard) for shard in shards.values())
        for length, evidence in proof.evidence.items():
            seen = [evidence.observed(found.joint[length].kl)]
            if coded is not None and len(coded.evidence[length].names) == len(evidence.names):
                seen.append(coded.evidence[length].observed(found.joint[length].kl + beside[length]))
            self.shards[length].append(seen)
            self.spare(length, found.joint[length].risk, *compared(evidence.needles), SIGNIFICANT)
        return proof, coded

    def expect(self, aim: Aim) -> float:
        """Tells how long the next plan will take, and those after it; returns the seconds of the next one."""
        inputs, s = self.measurement.inputs, self.measurement.inputs.settings
        if inputs.pace is None:
            return 0.0
        stages = inputs.pace.plan(s, inputs.team.size, {length: aim.sequences(length) for length in s.lengths})
        seconds, further = sum(stages.values()), max(min(PLANS, s.tries + s.bolder) - self.plans - 1, 0)
        inputs.expect({**stages, "plans": further * seconds + inputs.pace.speed(s)})
        return seconds

    def remarks(self) -> list[str]:
        """Returns what the text and the dtype leave of the budget, where that is little."""
        s, words = self.measurement.inputs.settings, list[str]()
        aim = self.aim(max(self.most(), 2))
        kept = min(aim.laws[n].per_kl * aim.affordable(n) / (aim.share * s.budget) for n in s.lengths)
        if kept < CERTAIN:
            words.append(
                f"held-out text is short: its uncertainty uses {share(1.0 - kept)} of the budget; more of it allows "
                "faster plans"
            )
        if self.pool() < 2 * s.held_out:
            words.append("held-out text is enough for one plan only")
        if self.stock.kl > APART * s.budget:
            words.append(
                f"two stock implementations differ by a KL of {in_nats(self.stock.kl)} nats/token in this dtype, which "
                "is not held against a plan"
            )
        return words

    def finished(self, found: Found, proof: Proof) -> Calibration:
        """Returns the result for a plan that passed."""
        worst, picks = proof.worst, found.allocation.picks
        plan = finished_plan(self.measurement, picks, worst, self.alpha, self.current.gates)
        verdicts = [asdict(verdict) for verdict in proof.verdicts.values()]
        return Calibration(plan, True, worst.sentence, self.reported(found.allocation, verdicts))

    def exact(self, sentence: str) -> Calibration:
        """Returns the exact plan as the result, with the reason."""
        plan = finished_plan(self.measurement, self.none, None, self.alpha, self.current.gates)
        text = f"the budget of {allowed(self.gates.budget)} cannot be met: {sentence}; the plan is exact"
        verdicts = [entry["verified"] for entry in self.history if "verified" in entry][-1:]
        return Calibration(plan, False, text, self.reported(None, verdicts))

    def reported(self, found: Allocation | None, verdicts: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns the report, with the KL of rounding that every measured KL holds."""
        words = report(self.measurement, self.history, found, self.alpha, verdicts)
        return {**words, "rounding": self.stock.kl}
