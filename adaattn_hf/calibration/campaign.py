"""One plan after another until one that spends the budget is proved.

Each plan is aimed at the bound that it will be held against: by the loss that whole plans showed on calibration text,
and by what the held-out shards of the plans before it showed. It is proved on held-out text of its own
(`policy.sequential` says what the looks may err). One that passes with room is followed by a bolder one; one that
fails by a smaller one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from ..plans.plan import Verified
from ..plans.program import Program
from ..policy.acceptance import Gates
from ..policy.aim import LossLaw, Observation
from ..policy.backoff import Caution
from ..policy.sequential import Attempts
from .assemble import finished_plan, report
from .measure import Measurement
from .over_codes import stored_tap
from .proof import Proof, Test, prove
from .search import JOINT_STEPS, Aim, Found, Joint, JointPasses, programs, seek, unit_losses
from .settings import Calibration
from .stock import stock_flips
from .storage import PROTOCOL, Rounding, aimed_at, choose_storage, roundings

SHARE = 0.9
"""Share of the budget that a predicted bound is to take."""
ROOM = 0.75
"""Share of the budget below which a bound leaves room for a bolder plan."""
BOLDER = 0.98
"""A bolder plan takes at most this share of the time of the one that passed."""
DRIFT = 0.5
"""Standard error of the loss per KL that text of another source adds, before any of it was looked at."""
OUTSIDE = 2.0
"""How many times the KL of every calibration source held-out text may lose without a word."""


class Campaign:
    """Plans one after another, each aimed by what those before it showed, and proved on text of its own.

    Args:
        measurement: Risks and prices of a model.
    """

    def __init__(self, measurement: Measurement) -> None:
        inputs = measurement.inputs
        s = inputs.settings
        self.measurement, self.passes = measurement, JointPasses(measurement)
        self.attempts = Attempts(s.alpha, s.tries, s.bolder)
        self.alpha = np.ones(len(s.lengths))
        self.caution = Caution()
        self.history: list[dict[str, Any]] = []
        self.used = 0
        self.looked_at: dict[str, list[int]] = {}
        self.plans = 0
        self.shards: dict[int, list[list[Observation]]] = {length: [] for length in s.lengths}
        self.roundings: list[Rounding] = []
        self.format: Rounding | None = None
        self.proved: Verified | str | None = None
        self.joint: dict[int, list[Joint]] = {length: [] for length in s.lengths}
        self.stock_flips = stock_flips(inputs)
        self.gates = Gates(s.budget, s.top1, s.kl_p999 if s.kl_p999 is not None else math.inf, s.needles_lost)

    def run(self) -> Calibration:
        """Returns what came out."""
        inputs = self.measurement.inputs
        passed: tuple[Found, Proof] | None = None
        alone: tuple[Found, Proof] | None = None
        saves = "memory" if inputs.settings.with_cache else "time"
        sentence = f"no choice saves {saves} inside the budget on this machine"
        inputs.say(self.forecast())
        if inputs.settings.with_cache:
            self.choose_format()
        while not self.attempts.exhausted:
            if self.late():
                over = f"{inputs.settings.minutes:g} minutes are over"
                sentence = f"{sentence}; {over}" if self.history else over
                break
            most = self.most()
            if most < min(inputs.settings.held_out, self.pool()) or most < 2:
                sentence = f"{sentence}; the held-out text is used up"
                break
            aim = self.aim(most)
            found, self.alpha = seek(
                self.passes, aim, self.alpha, self.caution.demoted, self.history, self.taught
            )
            if found is None or (passed and found.allocation.price > BOLDER * passed[0].allocation.price):
                break
            proof, coded = self.prove(found)
            worst = (coded or proof).worst
            # the last entry that says verified is of the plan that is returned
            kind = "bolder" if passed and not worst.passed else "verified"
            self.history.append({kind: asdict(worst), "held_out": self.looked_at})
            if worst.passed:
                passed, self.proved = (found, proof), worst if coded else None
                room = worst.upper < ROOM * self.gates.budget
                further = self.attempts.advanced() if room else None
                if further is None:
                    break
                self.attempts = further
            else:
                sentence = worst.sentence
                if alone is None and passed is None and proof.passed:  # what there is to fall back on
                    alone, self.proved = (found, proof), f"beside the plan {sentence}"
                self.attempts = self.attempts.failed()
                further = self.attempts.advanced() if passed else self.attempts
                if further is None:
                    break
                self.attempts = further
                losses = unit_losses(self.measurement, found.allocation.picks, self.alpha)
                self.caution = self.caution.failed(losses, of_loss=not worst.upper <= self.gates.budget)
        passed = passed or alone
        result = self.exact(sentence) if passed is None else self.finished(*passed)
        if not inputs.settings.with_cache:
            return result
        return self.with_cache(
            result, {} if passed is None else programs(self.measurement, passed[0].allocation.picks)
        )

    def choose_format(self) -> None:
        """Measures what formats of a cache cost, and takes the one beside which plans are sought."""
        measurement, lengths = self.measurement, self.measurement.inputs.settings.lengths
        self.roundings = roundings(self.passes)
        aim = self.aim(max(self.most(), 2))
        afforded = np.array([aim.affordable(length, 0.0, 0.0) for length in lengths])
        self.format = aimed_at(measurement, self.roundings, afforded)
        costs = [f"{one.stored} costs a KL of {max(one.kl.values()):.2e}" for one in self.roundings]
        measurement.inputs.say(
            f"cache: {', '.join(costs)} nats/token; windows are sought beside "
            f"{'numbers' if self.format is None else self.format.stored}"
        )

    def known(self, planned: bool) -> dict[str, Verified | str]:
        """What is known of formats beside the plan that was found, or without one."""
        budget, beside = self.gates.budget, "numbers" if self.format is None else self.format.stored
        found: dict[str, Verified | str] = {}
        for one in self.roundings:
            kl = max(one.kl.values())
            if planned:
                found[one.stored] = (
                    f"it costs a KL of {kl:.2e} nats/token, and windows were sought beside {beside}"
                )
            elif kl > budget:
                found[one.stored] = f"it costs a KL of {kl:.2e} nats/token, above {budget:.2e}"
        if planned and self.format is not None and self.proved is not None:
            found[self.format.stored] = self.proved
        return found

    def with_cache(self, result: Calibration, by_layer: Mapping[int, Program]) -> Calibration:
        """The outcome with what its cache may store; a budget that allows nothing of what was asked for is not met."""
        found, words = choose_storage(
            self.measurement,
            by_layer,
            self.current.gates,
            self.measurement.inputs.settings.alpha,
            self.used,
            self.known(bool(by_layer)),
        )
        sentence, report = f"{result.sentence}; {words}", {**result.report, PROTOCOL: words}
        if found is None:
            met = result.met and self.measurement.inputs.settings.kv_bytes is None
            return replace(result, met=met, sentence=sentence, report=report)
        plan = replace(result.plan, protocol={**result.plan.protocol, PROTOCOL: found})
        return replace(result, plan=plan, met=True, sentence=sentence, report=report)

    def late(self) -> bool:
        """Whether the time that was given is over, by the clock of the process that leads."""
        inputs = self.measurement.inputs
        minutes = inputs.settings.minutes
        return minutes is not None and inputs.team.tell(time.monotonic() - inputs.opened > 60.0 * minutes)

    def pool(self) -> int:
        """Held-out sequences that there are at the length with the fewest."""
        return min(len(sample.held_out) for sample in self.measurement.inputs.samples.values())

    def most(self) -> int:
        """Held-out sequences that the next plan may take: half of what is left, so that another may follow."""
        s, left = self.measurement.inputs.settings, self.pool() - self.used
        return min(s.most_held_out, left if left < 2 * s.held_out else max(s.held_out, left // 2))

    def law(self, length: int, joints: Sequence[Joint]) -> LossLaw:
        """How loss follows the KL at a length, by the plans of a search and by every shard that was looked at."""
        inputs = self.measurement.inputs
        beside = [] if self.format is None else [self.format.joint[length]]
        law = LossLaw.first_guess(self.scored(length)).learned([one.observed for one in (*beside, *joints)])
        if inputs.other_source:
            law = replace(law, per_kl_error=math.hypot(law.per_kl_error, DRIFT))
        for shard in self.shards[length]:
            law = law.learned(shard)
        if inputs.other_source:  # each source is proved by its own sequences
            sources = {sequence.source for sequence in inputs.samples[length].held_out}
            law = replace(law, spread=law.spread * math.sqrt(len(sources)))
        return law

    def scored(self, length: int) -> float:
        """Scored predictions of a sequence."""
        inputs = self.measurement.inputs
        return float(sum(len(one.targets) for one in inputs.readings(inputs.samples[length].joint[0])))

    def aim(self, most: int) -> Aim:
        """What the next plan is aimed at: as much text as noise needs, and the KL that it affords."""
        s = self.measurement.inputs.settings
        laws = {length: self.law(length, self.joint[length]) for length in s.lengths}
        first = min(s.held_out, most)
        beside = {} if self.format is None else self.format.kl
        share = SHARE * self.caution.share
        self.current = Aim(laws, self.gates, self.attempts.level, share, (first, most), beside)
        return self.current

    def taught(self, aim: Aim, length: int, joints: list[Joint]) -> Aim:
        """The aim after plans were measured at a length; flips of the likeliest token get their limit."""
        self.joint[length] = joints
        flips = max(
            (one.flips / math.sqrt(one.kl) for many in self.joint.values() for one in many if one.kl > 0),
            default=0.0,
        )
        gates = self.gates.with_flips(flips, self.stock_flips) if flips else self.gates
        self.current = replace(aim, laws={**aim.laws, length: self.law(length, joints)}, gates=gates)
        return self.current

    def prove(self, found: Found) -> tuple[Proof, Proof | None]:
        """Tests a plan on the next held-out text, and over the cache's format, and learns from it.

        Both must pass on the same text, so that each is tested at the whole level (an intersection-union test).
        """
        inputs, layers = self.measurement.inputs, self.measurement.layers
        self.plans += 1
        shards = {
            length: inputs.samples[length].held_out[self.used : self.used + self.current.sequences(length)]
            for length in inputs.settings.lengths
        }
        by_layer = programs(self.measurement, found.allocation.picks)
        heads = dict.fromkeys(layers.indices, layers.kv_heads)
        test = Test(self.current.gates, self.attempts.level, self.plans, found.predicted)
        proof, coded = prove(inputs, by_layer, heads, shards, test), None
        beside = {} if self.format is None else self.format.kl
        if proof.passed and self.format is not None:
            together = {length: kl + beside[length] for length, kl in found.predicted.items()}
            tap = stored_tap(by_layer, self.format.stored)
            coded = prove(inputs, by_layer, heads, shards, replace(test, predicted=together), tap)
        self.looked_at = {
            str(length): [self.used, self.used + len(evidence.names)]
            for length, evidence in proof.evidence.items()
        }
        self.used += max(len(shard) for shard in shards.values())
        for length, evidence in proof.evidence.items():
            seen = [evidence.observed(found.joint[length].kl)]
            if coded is not None and len(coded.evidence[length].names) == len(evidence.names):
                seen.append(coded.evidence[length].observed(found.joint[length].kl + beside[length]))
            self.shards[length].append(seen)
            self.warn_of_other_text(length, found.joint[length], evidence.mean_kl())
        return proof, coded

    def warn_of_other_text(self, length: int, joint: Joint, held: float) -> None:
        """Says where the held-out text loses what no source of the calibration text does."""
        low, high = min(joint.kl_by_source.values()), max(joint.kl_by_source.values())
        if self.plans == 1 and not low / OUTSIDE <= held <= high * OUTSIDE:
            self.measurement.inputs.say(
                f"at {length} tokens the held-out text lies outside the calibration text: KL {held:.2e} against "
                f"{low:.2e} to {high:.2e} nats/token; give --data of its kind beside the others"
            )

    def forecast(self) -> str:
        """Says before the long part how long it takes, and whether the text can decide."""
        inputs, layers = self.measurement.inputs, self.measurement.layers
        s, most = inputs.settings, max(self.most(), 2)
        aim = self.aim(most)
        seconds = sum(
            layers.seconds[length]
            * (s.joint * (1 + JOINT_STEPS) + 2 * aim.sequences(length) + 2 * s.haystacks)
            for length in s.lengths
        )
        words = []
        for length in s.lengths:
            law, size = aim.laws[length], aim.sequences(length)
            kl = aim.affordable(length, 0.0, 0.0)
            noise = 1.0 - law.per_kl * kl / (aim.share * s.budget)
            words.append(
                f"{size} of {len(inputs.samples[length].held_out)} held-out sequences of {length} tokens, whose noise "
                f"and whose uncertainty take about {noise:.0%} of the budget"
            )
        spare = (
            "" if self.pool() >= 2 * s.held_out else "; the text allows one plan only, more text allows more"
        )
        return f"search and proof of one plan: about {duration(seconds / inputs.team.size)}, {'; '.join(words)}{spare}"

    def finished(self, found: Found, proof: Proof) -> Calibration:
        """The plan that passed."""
        worst = proof.worst
        plan, tensors = finished_plan(
            self.measurement, found.allocation.picks, worst, self.alpha, self.current.gates
        )
        verdicts = list(proof.verdicts.values())
        words = report(self.measurement, self.history, found.allocation, self.alpha, verdicts)
        return Calibration(plan, tensors, True, worst.sentence, words)

    def exact(self, sentence: str) -> Calibration:
        """The exact plan, and why."""
        none = np.zeros(len(self.measurement.layers.units), dtype=np.int64)
        plan, _ = finished_plan(self.measurement, none, None, self.alpha, self.current.gates)
        budget = self.measurement.inputs.settings.budget
        text = f"the budget of {budget:.3g} nats/token cannot be met: {sentence}; the plan is exact"
        verdicts = [entry["verified"] for entry in self.history if "verified" in entry][-1:]
        words = report(self.measurement, self.history, None, self.alpha, [])
        return Calibration(plan, {}, False, text, {**words, "verdicts": verdicts})


def duration(seconds: float) -> str:
    """Returns a time in words."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
