"""From a loss budget to a verified plan, in five steps.

* measure: estimate the risk of every choice for every unit (a key/value head of a layer) from a few backward passes on
  sampled rows (`measure`, `fisher`)
* price: time the launches on this machine (`pricing`)
* choose: solve a multiple-choice knapsack within the budget of every length (`search`, `policy.knapsack`)
* aim: measure whole plans on calibration text, predict the bound that a plan will reach, and choose the next plan by it
  (`policy.aim`)
* verify: test the plan on held-out text, paired and clustered, in looks that grow until they decide (`proof`); then try
  bolder or smaller plans, each on fresh text

Each plan is chosen so that its predicted upper bound just meets the budget. The prediction is fitted to the losses of
whole plans on calibration text and of earlier plans on held-out text. Each plan is verified on held-out text of its own
(`policy.sequential` controls the error rate). After a plan that passes with room to spare a bolder one follows, after a
failure a smaller one.

All randomness comes from one seed, so that with prices from a file the plan is the same byte for byte. Prices measured
again differ in the last digits, which may decide between two choices of nearly equal price.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from adaattn_hf.eval.needles import compared

from ..plans.limits import SIGNIFICANT, Gates, most_rounding
from ..plans.plan import Verified
from ..plans.wording import allowed, in_nats, share
from ..policy.aim import LossLaw, Observation
from ..policy.knapsack import Allocation, Array
from ..policy.sequential import Attempts
from .assemble import finished_plan, report
from .inputs import PLANS, OutOfTime
from .layers import Measurement, Picks, bound_layers, picks_of
from .passes import StockDistance, stock_distance, whole_forward
from .proof import Proof, Test, prove
from .search import REHEARSED, Aim, Found, Joint, JointPasses, seek
from .settings import Calibration, CalibrationSettings
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


def decided(measurement: Measurement, budget: float | None = None) -> Calibration:
    """Returns the plan of a budget in nats/token, that of the settings if absent, and times whole passes of it.

    Budgets are searched and verified one by one, and nothing that one learns from held-out text aims another: each has
    the error rate of its settings, and k of them are all kept with at least 1 - k alpha.
    """
    inputs = measurement.inputs
    result = choose_and_verify(measurement, replace(inputs.settings, budget=budget or inputs.settings.budget))
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


def choose_and_verify(measurement: Measurement, settings: CalibrationSettings | None = None) -> Calibration:
    """Returns the boldest plan that passed verification, or the exact plan.

    `settings` may have another budget or verification than those of the measurement.
    """
    if settings is not None:
        measurement = replace(measurement, inputs=measurement.inputs.with_settings(settings))
    campaign, state = searched(Campaign(measurement, stock_distance(measurement.inputs)))
    return campaign.result(state)


@dataclass(frozen=True, eq=False)
class State:
    """What is known after some plans.

    Attributes:
        attempts: How many plans may still be tested, and at which level.
        aim: The aim of the last plan, with all that its search measured.
        alpha: `[lengths]`, factors that re-scale sums of risks.
        sentence: Why the search ends here, if it does.
        used: Held-out sequences that were looked at.
        plans: Plans that were verified.
        shards: By length, for each plan what held-out text showed of it.
        passed: The boldest plan that passed.
        alone: A plan that passed without the cache's format, where it failed with it.
        cache: The verdict on the format together with the plan, or why there is none.
        ended: Whether no further plan follows.
    """

    attempts: Attempts
    aim: Aim
    alpha: Array
    sentence: str
    used: int = 0
    plans: int = 0
    shards: Mapping[int, Sequence[Sequence[Observation]]] = field(default_factory=dict)
    passed: tuple[Found, Proof] | None = None
    alone: tuple[Found, Proof] | None = None
    cache: Verified | str | None = None
    ended: bool = False

    def stopped(self, words: str = "") -> State:
        """Returns the state at which no further plan follows, with more words why."""
        return replace(self, sentence=self.sentence + words, ended=True)


@dataclass(frozen=True, eq=False)
class Campaign:
    """Searches and verifies plans one after another, each chosen with what the earlier ones showed.

    `stock` is how far two exact implementations lie apart. Where a smaller cache is wanted, `roundings` are the losses
    of its formats, and `format` the one that plans are combined with. `log` is the report of all steps.
    """

    measurement: Measurement
    stock: StockDistance
    roundings: Sequence[Rounding] = ()
    format: Rounding | None = None
    log: list[dict[str, Any]] = field(default_factory=list)

    @property
    def passes(self) -> JointPasses:
        """Whole plans on calibration text."""
        return JointPasses(self.measurement, self.stock.kl)

    @property
    def gates(self) -> Gates:
        """The limits that a plan must keep."""
        s, dtype = self.measurement.inputs.settings, self.measurement.layers.bound.dtype
        return Gates(s.budget, s.top1, s.needles_lost, min(self.stock.kl, most_rounding(dtype)))

    @property
    def pool(self) -> int:
        """Held-out sequences, at the length with the fewest."""
        return min(len(sample.held_out) for sample in self.measurement.inputs.samples.values())

    @property
    def beside(self) -> Mapping[int, float]:
        """By length, KL that the cache's format adds, nats/token."""
        return {} if self.format is None else self.format.kl

    def start(self) -> State:
        """Returns the state before the first plan."""
        s = self.measurement.inputs.settings
        # where a smaller cache is wanted, formats are tested without a plan if every plan fails
        attempts = Attempts(s.alpha, s.tries, s.bolder, reserved=int(s.with_cache))
        saves = "memory" if s.with_cache else "time"
        aim = Aim({}, self.gates, attempts.level, SHARE, (0, 0), joints={length: [] for length in s.lengths})
        sentence = f"no choice saves {saves} inside the budget on this machine"
        state = State(attempts, aim, np.ones(len(s.lengths)), sentence, shards=dict.fromkeys(s.lengths, ()))
        return replace(state, aim=self.aim(state, max(self.most(state), 2)))

    def with_format(self, state: State) -> Campaign:
        """Returns the campaign with the loss of each cache format, and the one that plans are combined with."""
        found, lengths = roundings(self.passes), self.measurement.inputs.settings.lengths
        chosen = aimed_at(self.measurement, found, np.array([state.aim.affordable(length) for length in lengths]))
        costs = [f"{one.stored} costs a KL of {in_nats(max(one.kl.values()))}" for one in found]
        self.measurement.inputs.run.say(
            f"cache: {', '.join(costs)} nats/token; windows are sought beside "
            f"{'numbers' if chosen is None else chosen.stored}"
        )
        return replace(self, roundings=found, format=chosen)

    def most(self, state: State) -> int:
        """Returns how many held-out sequences the next plan may use: half of the rest, so that another can follow."""
        s, left = self.measurement.inputs.settings, self.pool - state.used
        return min(s.most_held_out, left if left < 2 * s.held_out else max(s.held_out, left // 2))

    def law(self, state: State, length: int, joints: Sequence[Joint]) -> LossLaw:
        """Returns the law of loss per KL at a length, fitted to the plans of a search and all held-out shards."""
        inputs = self.measurement.inputs
        beside = [] if self.format is None else [self.format.joint[length]]
        scored = float(sum(len(one.targets) for one in inputs.windows(inputs.samples[length].joint[0])))
        law = LossLaw.first_guess(scored, self.stock.kl).learned([one.observed for one in (*beside, *joints)])
        if inputs.other_source:
            law = replace(law, per_kl_error=math.hypot(law.per_kl_error, DRIFT))
        for shard in state.shards[length]:
            law = law.learned(shard)
        # each source is verified by its own sequences
        return replace(law, spread=law.spread * math.sqrt(inputs.sources))

    def aim(self, state: State, most: int) -> Aim:
        """Returns the aim of the next plan: how much held-out text to use, and the KL that it may have."""
        s, last = self.measurement.inputs.settings, state.aim
        laws = {length: self.law(state, length, last.joints[length]) for length in s.lengths}
        looks, level = (min(s.held_out, most), most), state.attempts.level
        return replace(last, laws=laws, gates=self.gates, level=level, looks=looks, beside=self.beside)

    def taught(self, state: State, aim: Aim, length: int, joints: list[Joint]) -> Aim:
        """Returns the aim after plans were measured at a length, with the limit on flips of the likeliest token."""
        every, last = {**aim.joints, length: joints}, joints[-1]
        roots = (one.flips / math.sqrt(one.kl) for many in every.values() for one in many if one.kl > 0)
        flips = max(roots, default=0.0)
        return replace(
            aim,
            joints=every,
            laws={**aim.laws, length: self.law(state, length, joints)},
            gates=self.gates.with_flips(flips, self.stock.flips) if flips else self.gates,
            needles=self.spared(aim.needles, length, last.risk, last.needles, REHEARSED),
        )

    def spared(
        self, needles: Mapping[int, float], length: int, risk: float, seen: tuple[int, int, int], level: float
    ) -> Mapping[int, float]:
        """Returns the limits on the risk for retrieval, lowered where a plan of that risk has lost too many needles."""
        if not self.gates.forgets(*seen, level):
            return needles
        lost, won, found = seen
        closer = risk * float(np.clip(self.gates.spared(found) / (lost - won), *CLOSER))
        return {**needles, length: min(closer, needles.get(length, math.inf))}

    def tried(self, state: State) -> State:
        """Returns the state after one plan more."""
        inputs = self.measurement.inputs
        inputs.refuse_late()
        most = self.most(state)
        if most < max(min(inputs.settings.held_out, self.pool), 2 * inputs.sources):
            return state.stopped("; the held-out text is used up: give more of it")
        state = replace(state, aim=self.aim(state, most))
        if inputs.team.tell(self.expect(state)) > inputs.left and state.passed:
            return state.stopped()  # a further plan would not be verified in time
        found, alpha, aim = seek(self.passes, state.aim, state.alpha, self.log, partial(self.taught, state))
        state = replace(state, alpha=alpha, aim=aim)
        if found is None or (state.passed and found.allocation.price > BOLDER * state.passed[0].allocation.price):
            needles = " and keeps the needles in the calibration text; --needles allows more to be lost"
            return state.stopped(needles if aim.needles and not state.plans else "")
        state, proof, coded = self.verified(state, found)
        worst = (coded or proof).worst
        if worst.passed:
            state = replace(state, passed=(found, proof), cache=worst if coded else None)
            further = state.attempts.advanced() if worst.upper < ROOM * self.gates.budget else None
        else:
            attempts = state.attempts.failed()
            further = attempts.advanced() if state.passed else attempts
            lost = (coded or proof).lost or worst.upper <= self.gates.budget
            aim = replace(state.aim, share=state.aim.share * (AFTER_OTHERS if lost else AFTER_LOSS))
            if inputs.settings.with_cache:
                aim = replace(aim, least={length: HALVED * one.added for length, one in found.joint.items()})
            if state.alone is None and state.passed is None and proof.passed:  # the fallback
                state = replace(state, alone=(found, proof), cache=f"beside the plan {worst.sentence}")
            state = replace(state, sentence=worst.sentence, attempts=attempts, aim=aim)
        return state.stopped() if further is None else replace(state, attempts=further)

    def verified(self, state: State, found: Found) -> tuple[State, Proof, Proof | None]:
        """Verifies a plan on the next held-out text, alone and with the cache's format, and learns from the result.

        Both must pass on the same text, so each may be tested at the full level (an intersection-union test).
        """
        inputs, aim, picks = self.measurement.inputs, state.aim, found.allocation.picks
        shards = {
            length: inputs.samples[length].held_out[state.used : state.used + aim.sequences(length)]
            for length in inputs.settings.lengths
        }
        test = Test(aim.gates, state.attempts.level, state.plans + 1, found.predicted)
        proof, coded = prove(self.measurement, picks, shards, test), None
        if proof.passed and self.format is not None:
            together = {length: kl + self.beside[length] for length, kl in found.predicted.items()}
            coded = prove(self.measurement, picks, shards, replace(test, predicted=together, stored=self.format.stored))
        worst = (coded or proof).worst
        # the last `verified` entry belongs to the plan that is returned
        looked_at = {str(length): [state.used, state.used + len(one.names)] for length, one in proof.evidence.items()}
        kind = "bolder" if state.passed and not worst.passed else "verified"
        self.log.append({kind: asdict(worst), "held_out": looked_at})
        learned, needles = dict(state.shards), aim.needles
        for length, evidence in proof.evidence.items():
            joint = found.joint[length]
            seen = [evidence.observed(joint.kl)]
            if coded is not None and len(coded.evidence[length].names) == len(evidence.names):
                seen.append(coded.evidence[length].observed(joint.kl + self.beside[length]))
            learned[length] = (*learned[length], seen)
            needles = self.spared(needles, length, joint.risk, compared(evidence.needles), SIGNIFICANT)
        used = state.used + max(len(shard) for shard in shards.values())
        aim = replace(aim, needles=needles)
        return replace(state, used=used, plans=state.plans + 1, shards=learned, aim=aim), proof, coded

    def expect(self, state: State) -> float:
        """Tells how long the next plan will take, and those after it; returns the seconds of the next one."""
        inputs, s = self.measurement.inputs, self.measurement.inputs.settings
        if inputs.pace is None:
            return 0.0
        stages = inputs.pace.plan(s, inputs.team.size, {length: state.aim.sequences(length) for length in s.lengths})
        seconds, further = sum(stages.values()), max(min(PLANS, s.tries + s.bolder) - state.plans - 1, 0)
        inputs.run.expect({**stages, "plans": further * seconds + inputs.pace.speed(s)})
        return seconds

    def remarks(self, aim: Aim) -> list[str]:
        """Returns what the text and the dtype leave of the budget, where that is little."""
        s, words = self.measurement.inputs.settings, list[str]()
        kept = min(aim.laws[n].per_kl * aim.affordable(n) / (aim.share * s.budget) for n in s.lengths)
        if kept < CERTAIN:
            words.append(
                f"held-out text is short: its uncertainty uses {share(1.0 - kept)} of the budget; more of it allows "
                "faster plans"
            )
        if self.pool < 2 * s.held_out:
            words.append("held-out text is enough for one plan only")
        if self.stock.kl > APART * s.budget:
            words.append(
                f"two stock implementations differ by a KL of {in_nats(self.stock.kl)} nats/token in this dtype, which "
                "is not held against a plan"
            )
        return words

    def result(self, state: State) -> Calibration:
        """Returns the plan that passed, or the exact one with the reason, and the format of the cache."""
        chosen, gates = state.passed or state.alone, state.aim.gates
        if chosen is None:
            picks: Picks = np.zeros(len(self.measurement.layers.units), dtype=np.int64)
            sentence = f"the budget of {allowed(gates.budget)} cannot be met: {state.sentence}; the plan is exact"
            verdicts, worst = [entry["verified"] for entry in self.log if "verified" in entry][-1:], None
        else:
            (found, proof), worst = chosen, chosen[1].worst
            picks, sentence = found.allocation.picks, worst.sentence
            verdicts = [asdict(verdict) for verdict in proof.verdicts.values()]
        plan = finished_plan(self.measurement, picks, worst, state.alpha, gates)
        allocation: Allocation | None = None if chosen is None else chosen[0].allocation
        noted = report(self.measurement, self.log, allocation, state.alpha, verdicts)
        # every measured KL holds that of rounding
        made = Calibration(plan, chosen is not None, sentence, {**noted, "rounding": self.stock.kl})
        if not self.measurement.inputs.settings.with_cache:
            return made
        known = self.verdicts(state, bool(picks.any()))
        stored, words = choose_storage(self.measurement, picks, gates, state.attempts.left, state.used, known)
        sentence, noted = f"{made.sentence}; {words}", {**made.report, PROTOCOL: words}
        if stored is None:  # not met if `kv_bytes` is not reached
            met = made.met and self.measurement.inputs.settings.kv_bytes is None
            return replace(made, met=met, sentence=sentence, report=noted)
        plan = replace(plan, protocol={**plan.protocol, PROTOCOL: stored})
        return replace(made, plan=plan, met=True, sentence=sentence, report=noted)

    def verdicts(self, state: State, planned: bool) -> dict[str, Verified | str]:
        """Returns a verdict on each format, or why it is not tested; `bound_layer`: together with the plan found."""
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
        if planned and self.format is not None and state.cache is not None:
            found[self.format.stored] = state.cache
        return found


def searched(campaign: Campaign) -> tuple[Campaign, State]:
    """Returns the campaign with the cache format that it chose, and the state at its end."""
    inputs, state = campaign.measurement.inputs, campaign.start()
    for words in campaign.remarks(state.aim):
        inputs.run.say(words)
    try:
        if inputs.settings.with_cache:
            campaign = campaign.with_format(state)
        while not (state.ended or state.attempts.exhausted):
            state = campaign.tried(state)
    except OutOfTime as over:
        state = state.stopped(f"; {over}") if campaign.log else replace(state, sentence=str(over))
    return campaign, state
