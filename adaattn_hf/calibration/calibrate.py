"""From a loss budget to a verified plan, in five steps.

* measure: the risk of every choice of every unit, a key/value head of a layer, from a few backward passes on
  sampled rows (`fisher`)
* price: the launches, timed on this machine (`pricing`)
* choose: a multiple-choice knapsack inside the budget of every length (`policy.knapsack`)
* re-scale: the sum of risks by the measured KL of the plan, and choose again
* verify: held-out text, paired and clustered, with gates (`verify`); after a failure spend less, on fresh text

Everything random comes from one seed; with the prices of a file the plan is the same byte for byte. Prices
timed anew differ in the last digits, and may tip a choice between two of nearly the same price.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from adaattn_hf.approximate import Program
from adaattn_hf.calibration import needles, verify
from adaattn_hf.calibration.arms import Progress, compare_all, plan_tap, programs_of, silent
from adaattn_hf.calibration.assemble import finished_plan, make_plan, report, save_plan
from adaattn_hf.calibration.measure import Measurements
from adaattn_hf.calibration.scoring import NEXT_TOKEN, Scoring
from adaattn_hf.calibration.settings import Calibration, CalibrationSettings
from adaattn_hf.calibration.state import CalibrationState
from adaattn_hf.plan import Choice, Plan, Verified
from adaattn_hf.policy.acceptance import Gates
from adaattn_hf.policy.backoff import Backoff, adjusted_alpha
from adaattn_hf.policy.decisive import decisive_pairs
from adaattn_hf.policy.knapsack import Allocation, Array, allocate
from adaattn_hf.policy.prices import PriceTable
from adaattn_hf.policy.risk import rescale

__all__ = [
    "Calibration",
    "CalibrationSettings",
    "Run",
    "ablation_rows",
    "calibrate",
    "prepare_run",
    "save_plan",
]

JOINT_STEPS = 4
"""Plans measured at most before one is verified."""


def calibrate(
    model: nn.Module,
    encode: Callable[[str], Sequence[int]],
    data: Sequence[str | Path],
    settings: CalibrationSettings,
    *,
    verify_data: Sequence[str | Path] | None = None,
    scoring: Scoring = NEXT_TOKEN,
    prices: PriceTable | None = None,
    directory: Path | None = None,
    resume: bool = False,
    progress: Progress = silent,
) -> Calibration:
    """Returns a plan for a model, verified on held-out text.

    Args:
        model: A model loaded with `attn_implementation="adaattn"`, on the device and in the dtype it will run
            in.
        encode: Text to token ids, without special tokens.
        data: Files and directories of text.
        settings: How the plan is made.
        verify_data: Held-out text of another source; disjoint parts of `data` when absent.
        scoring: What the model is scored on: `MaskedTokens.of(tokenizer)` for a masked-language model.
        prices: Prices measured before; measured now when absent.
        directory: Where the state is kept after every sequence.
        resume: Go on with the state found there.
        progress: Told what is being done.

    Raises:
        ValueError: If the model cannot carry a plan, or the text is too short.
    """
    held = list(verify_data) if verify_data else None
    run = Run(model, encode, list(data), settings, held, progress, scoring)
    run.measure(directory, resume)
    run.price(prices)
    result = run.choose_and_verify()
    if directory is not None and run.team.leads:
        CalibrationState.forget(directory)
    return result


class Run(Measurements):
    """One calibration: measured, then chosen and verified."""

    def solve(
        self, budget: Array, demoted: Sequence[int] = (), allowed: Callable[[Choice], bool] | None = None
    ) -> Allocation:
        """Returns the cheapest allocation inside a budget per length, some units exact, of allowed choices alone."""
        risks = self.risks()
        for place, choice in enumerate(self.candidates.choices):
            if place and allowed is not None and not allowed(choice):
                risks[:, :, place] = np.inf
        for unit in demoted:
            risks[:, unit, 1:] = np.inf
        return allocate(self.prices, risks, budget, self.launches)

    def measured(self, picks: NDArray[np.int64], length: int) -> dict[str, float]:
        """Returns what held-out text of a length says about an allocation, and its price ratio there."""
        held = self.samples[length][0]["try 1"]
        states = self.held_states.setdefault(length, {})
        evidence = verify.gather(self.arms, self.programs(picks), held, scoring=self.scoring, states=states)
        bound = evidence.bound(0.95)
        return {
            "delta_nll": bound.mean,
            "upper": bound.upper,
            "kl": float(torch.cat(evidence.kl).mean()),
            "top1": evidence.agree / bound.tokens,
            "ratio": self.ratio(picks, length),
        }

    def evaluate(self, picks: NDArray[np.int64]) -> dict[str, float]:
        """Returns predicted and measured loss and the price ratio of an allocation at the longest length."""
        units = np.arange(len(self.units))
        risk = float(self.risks()[-1, units, picks].sum())
        return {"predicted": risk, **self.measured(picks, self.settings.lengths[-1])}

    def uniform(self, choice: Choice) -> dict[str, float]:
        """Returns the same for one choice on every unit."""
        return self.evaluate(np.full(len(self.units), self.candidates.choices.index(choice)))

    def programs(self, picks: NDArray[np.int64]) -> dict[int, Program]:
        """Returns the programs of an allocation."""
        return programs_of(make_plan(self, picks), self.tensors)

    def picks(self, plan: Plan) -> NDArray[np.int64]:
        """Returns the place among the candidates of each unit's choice in a plan."""
        exact = (self.candidates.choices[0],) * self.kv_heads
        layers = {layer.layer: layer.choices for layer in plan.layers}
        chosen = [choice for index in self.layers for choice in layers.get(index, exact)]
        return np.array([self.candidates.choices.index(choice) for choice in chosen], dtype=np.int64)

    def joint(self, picks: NDArray[np.int64], length: int) -> tuple[float, float]:
        """Returns the measured KL of an allocation on the sequences set aside for it, and its flips per token."""
        tap = plan_tap(self.programs(picks))
        sequences = self.samples[length][0]["joint"]
        parts = [self.readings(sequences[number]) for number in self.team.mine(len(sequences))]
        if length not in self.exact_states:
            self.exact_states[length] = [[self.arms.exact(one) for one in readings] for readings in parts]
        scores = [
            compare_all(self.arms, readings, tap, states)
            for readings, states in zip(parts, self.exact_states[length], strict=True)
        ]
        own = [(float(score.kl.mean()), float(score.agree.double().mean())) for score in scores]
        kl, agree = np.mean(self.team.gather(own, len(sequences)), axis=0)
        return float(kl), 1.0 - float(agree)

    def refine(self, found: Allocation, budget: Array) -> bool:
        """Measures the pairs that decide an allocation directly; returns whether there were any."""
        pairs = decisive_pairs(found.picks, self.prices, self.risks(), budget, self.settings.direct)
        if pairs:
            self.measure_directly(pairs)
        return bool(pairs)

    def settle(
        self, backoff: Backoff, alpha: Array, history: list[dict[str, Any]]
    ) -> tuple[Allocation, Array]:
        """Returns the allocation for a share of the budget, and the factors of risk that its measured KL gave.

        Args:
            backoff: The share, and units that must be exact.
            alpha: `[lengths]`, the present factors.
            history: Takes what was predicted and measured.
        """
        s = self.settings
        limit = np.full(len(s.lengths), s.budget * backoff.share)
        flips_allowed = 1.0 - Gates.for_budget(s.budget).top1
        found = self.solve(limit / alpha, backoff.demoted)
        if s.direct and not self.decided and self.refine(found, limit / alpha):
            found = self.solve(limit / alpha, backoff.demoted)
        for step in range(JOINT_STEPS):
            self.progress("joint", step, JOINT_STEPS)
            if not found.picks.any():
                break
            pairs = [self.joint(found.picks, length) for length in s.lengths]
            measured, flips = np.array([kl for kl, _ in pairs]), np.array([flip for _, flip in pairs])
            predicted = found.risk * alpha
            history.append(
                {"predicted": predicted.tolist(), "measured": measured.tolist(), "flips": flips.tolist()}
            )
            # Spend what the budget allows, but never twice as much because one measurement came out small.
            alpha = np.array(
                [max(rescale(a, p, m), 0.5 * a) for a, p, m in zip(alpha, predicted, measured, strict=True)]
            )
            # Flips of the likeliest token grow with the root of the KL: what fails that gate is not worth a try.
            over = flips > 0.95 * flips_allowed
            room = measured * (0.85 * flips_allowed / np.maximum(flips, 1e-9)) ** 2
            limit = np.where(over, np.minimum(limit, room), limit)
            if not over.any() and (np.abs(measured / np.maximum(predicted, 1e-30) - 1.0) <= 0.2).all():
                break
            found = self.solve(limit / alpha, backoff.demoted)
        self.progress("joint", JOINT_STEPS, JOINT_STEPS)
        return found, alpha

    def choose_and_verify(self) -> Calibration:
        """Returns the first plan that passes, or the exact plan."""
        s = self.settings
        self.decided = []
        backoff = Backoff(limit=s.tries)
        alpha = np.ones(len(s.lengths))
        history: list[dict[str, Any]] = []
        verdicts: list[Verified] = []
        sentence = "no choice saves time inside the budget on this machine"
        while not backoff.exhausted:
            found, alpha = self.settle(backoff, alpha, history)
            if not found.picks.any():
                break
            verdicts = self._verify(found, alpha, backoff.tries + 1)
            worst = max(verdicts, key=lambda verdict: (not verdict.passed, verdict.upper))
            history.append({"verified": asdict(worst)})
            sentence = worst.sentence
            if worst.passed:
                plan, tensors = finished_plan(self, found.picks, worst, alpha)
                return Calibration(
                    plan, tensors, True, sentence, report(self, history, found, alpha, verdicts)
                )
            risk = (self.risks() * alpha[:, None, None]).max(axis=0)
            backoff = backoff.failed(risk[np.arange(len(self.units)), found.picks])
        plan, _ = finished_plan(self, np.zeros(len(self.units), dtype=np.int64), None, alpha)
        text = f"the budget of {s.budget:.3g} nats/token cannot be met: {sentence}; the plan is exact"
        return Calibration(plan, {}, False, text, report(self, history, None, alpha, verdicts))

    def _verify(self, found: Allocation, alpha: Array, tries: int) -> list[Verified]:
        """The verdict of each length."""
        s = self.settings
        programs = self.programs(found.picks)
        confidence = 1.0 - adjusted_alpha(s.alpha, s.tries)
        verdicts = []
        for place, length in enumerate(s.lengths):
            held = self.samples[length][0][f"try {tries}"]

            def step(done: int, total: int, length: int = length) -> None:
                self.progress(f"verify {length}", done, total)

            step(0, len(held) + (s.haystacks if self.scoring.generates else 0))

            evidence = verify.gather(
                self.arms,
                programs,
                held,
                scoring=self.scoring,
                haystacks=s.haystacks,
                needles=min(s.needles, needles.most(length)),
                seed=s.seed + tries,
                step=step,
            )
            verdicts.append(
                verify.judge(
                    evidence,
                    Gates.for_budget(s.budget),
                    confidence=confidence,
                    tries=tries,
                    share=verify.activation(
                        programs, dict.fromkeys(self.layers, self.kv_heads), length, self.scoring.causal
                    ),
                    predicted=float(found.risk[place] * alpha[place]),
                )
            )
        return verdicts


def prepare_run(
    model: nn.Module,
    encode: Callable[[str], Sequence[int]],
    data: Sequence[str | Path],
    settings: CalibrationSettings,
    verify_data: Sequence[str | Path] | None = None,
    prices: PriceTable | None = None,
    scoring: Scoring = NEXT_TOKEN,
    directory: Path | None = None,
) -> Run:
    """Returns a calibration with risks and prices measured and nothing chosen, for studies.

    Given a directory, what was measured is kept there, and a state found there is gone on with.
    """
    held = list(verify_data) if verify_data else None
    run = Run(model, encode, list(data), settings, held, silent, scoring)
    run.measure(directory, directory is not None)
    run.price(prices)
    return run


def ablation_rows(run: Run, allowed: Callable[[Choice], bool], budget: float) -> dict[str, float]:
    """Returns predicted and measured loss and the price ratio of the best plan of allowed choices inside a budget."""
    return run.evaluate(run.solve(np.full(len(run.settings.lengths), budget), allowed=allowed).picks)
