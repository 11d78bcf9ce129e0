"""Judges plans by held-out text: paired loss, KL, likeliest tokens, needles and activation rate, in one judgement."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch

from adaattn_hf.eval.arms import stored_tap
from adaattn_hf.eval.needles import compared
from adaattn_hf.eval.windows import TokenSequence

from ..plans.bound_layer import BoundLayer
from ..plans.limits import Gates, words
from ..plans.plan import Verified
from ..plans.wording import share
from ..stats.paired import Float, Ratio, TokenScores, clustered, clustered_ratio, joined, student_quantile
from .inputs import Inputs
from .layers import Measurement, bound_layers, make_plan
from .search import Way

Programs = Mapping[int, BoundLayer]
"""What the layers of a plan run, by index; exact ones may be absent."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """What held-out sequences show of a plan.

    With `apart` the loss of every source must keep the budget by itself; all else is counted over all of them.
    """

    sequences: Sequence[TokenSequence]
    sums: Sequence[float]  # of token differences, by sequence
    tokens: Sequence[int]  # scored ones, by sequence
    kl: Float  # of every token
    agree: int  # tokens with the same likeliest token
    needles: Sequence[tuple[bool, bool]] = ()  # whether stock attention finds it, and the plan
    apart: bool = False

    @classmethod
    def of(
        cls,
        sequences: Sequence[TokenSequence],
        scores: Sequence[TokenScores],
        needles: Sequence[tuple[bool, bool]] = (),
        apart: bool = False,
    ) -> Self:
        """Returns what the scores of each sequence add up to."""
        sums, tokens = [float(one.delta[0].sum()) for one in scores], [one.nll.shape[1] for one in scores]
        whole = joined(scores)
        return cls(sequences, sums, tokens, whole.kl[0], int(whole.agree.sum()), needles, apart)

    def ratio(self, source: str | None = None) -> Ratio:
        """Returns the mean loss difference with its error, clustered by document, of one source or of all."""
        places = [place for place, one in enumerate(self.sequences) if source in (None, one.source)]
        sums, tokens = [self.sums[place] for place in places], [self.tokens[place] for place in places]
        return clustered_ratio(*clustered([self.sequences[place].document for place in places], sums, tokens))

    def worst(self, confidence: float) -> Ratio:
        """Returns the loss difference whose upper bound decides: with `apart` that of the source with the largest.

        All sources must pass, so each may be tested at the full level (an intersection-union test; Berger 1982,
        Technometrics 24).
        """
        apart: Iterable[str | None] = dict.fromkeys(one.source for one in self.sequences) if self.apart else (None,)
        return max(map(self.ratio, apart), key=lambda one: one.upper(confidence))


def activation(bound_layers: Programs, heads: int, length: int, causal: bool) -> tuple[float, float]:
    """Returns the shares of (token, head) pairs at a length that a plan changes, and for which it drops keys.

    `heads` counts the key/value heads of all layers, exact ones too.
    """
    counts = [bound_layer.changed_rows(0, length, length, causal) for bound_layer in bound_layers.values()]
    changed, dropped = (sum(count[which] for count in counts) for which in (0, 1))
    return changed / (heads * length), dropped / (heads * length)


def judge(
    evidence: Evidence,
    gates: Gates,
    *,
    confidence: float,
    number: int,
    activation_share: tuple[float, float],
    predicted: float,
) -> Verified:
    """Returns the verdict on the evidence of the `number`-th candidate; `confidence` is the bound's level."""
    worst, tokens = evidence.worst(confidence), sum(evidence.tokens)
    upper, mean, tail = worst.upper(confidence), float(evidence.kl.mean()), np.quantile(evidence.kl, 0.999)
    top1 = evidence.agree / max(tokens, 1)
    by_stock, by_plan = np.mean(evidence.needles, axis=0).tolist() if evidence.needles else (None, None)
    verdict = Verified(
        passed=False, delta_nll=worst.mean, upper=upper, confidence=confidence, tries=number, documents=worst.clusters,
        tokens=tokens, kl=mean, kl_p999=float(tail), top1=top1, retrieval_stock=by_stock, retrieval_plan=by_plan,
        activation=activation_share[0], activation_keys=activation_share[1], predicted_kl=predicted, sentence="",
        needles=len(evidence.needles), needles_lost=compared(evidence.needles)[0],
    )  # fmt: skip
    reasons = gates.refusals(verdict)
    if reasons:
        return replace(verdict, sentence=f"failed: {'; '.join(reasons)}")
    gate, used = gates.nearest(upper, mean, top1)
    nearest = f"{words(verdict, gates)}; nearest to its limit: {gate}, at {share(used)}"
    return replace(verdict, passed=True, sentence=nearest)


@dataclass(frozen=True, eq=False)
class Proof:
    """The verdicts on a candidate by length: of the plan `alone`, and over its cache's format (`coded`).

    After one that failed nothing more was tested. `loss` is the loss difference that the last bound is of.
    """

    alone: Mapping[int, Verified]
    coded: Mapping[int, Verified]
    loss: Ratio

    @property
    def verdicts(self) -> tuple[Verified, ...]:
        """All verdicts."""
        return *self.alone.values(), *self.coded.values()

    @property
    def passed(self) -> bool:
        """Whether every one passed."""
        return all(verdict.passed for verdict in self.verdicts)

    @property
    def worst(self) -> Verified:
        """The verdict that failed, or the one with the largest bound."""
        return worst(self.verdicts)

    def remedy(self, gates: Gates) -> str:
        """Returns in words what would change the verdict of a proof that failed."""
        failed, loss = self.worst, self.loss
        others = gates.failures(0.0, failed.kl, failed.top1, *failed.compared)
        if others or loss.mean >= gates.budget or loss.error is None:
            return "more held-out text would not change that; a larger budget, or shorter --lengths, may"
        quantile = student_quantile(failed.confidence, loss.clusters - 1)
        more = math.ceil((quantile * loss.error / (gates.budget - loss.mean)) ** 2)
        return (
            f"about {more:,} times as much held-out text would change that: its mean is within the budget (--held-out)"
        )


def worst(verdicts: Iterable[Verified]) -> Verified:
    """Returns the verdict that failed, or the one with the largest bound."""
    return max(verdicts, key=lambda verdict: (not verdict.passed, verdict.upper))


def verdict_at(
    length: int, inputs: Inputs, plan: Programs, heads: int, gates: Gates, *, stored: str, number: int, predicted: float
) -> tuple[Evidence, Verified]:
    """Returns the verdict of all held-out text of a length on a plan, over a cache of the format `stored`.

    `heads` are those of `activation`; the others are as in `judge`.
    """
    s, held_out, seed = inputs.settings, inputs.samples[length]["held_out"], inputs.settings.seed + 1
    haystacks = s.haystacks if inputs.scoring.generates else 0

    def step(done: int) -> None:
        inputs.run.progress(f"verify {length}", done, len(held_out) + haystacks)

    step(0)
    # one seed: masked positions and needles are the same for all candidates, as the text is, and in every process
    generator = torch.Generator().manual_seed(seed)
    made = [inputs.haystack(held_out[index % len(held_out)], generator) for index in range(haystacks)]
    scores, needles = inputs.score(stored_tap(plan, stored), held_out, made, seed, step)
    evidence = Evidence.of(held_out, scores, needles, inputs.other_source)
    share = activation(plan, heads, length, inputs.scoring.causal)
    verdict = judge(
        evidence, gates, confidence=1.0 - s.alpha, number=number, activation_share=share, predicted=predicted
    )
    return evidence, verdict


def prove(measurement: Measurement, way: Way, predicted: Mapping[int, float], gates: Gates, number: int) -> Proof:
    """Returns the verdicts of all held-out text on the `number`-th candidate, at the full level.

    It must pass at every length, alone and over its cache's format, so each is tested at the full level (an
    intersection-union test). KL is predicted by length, nats/token.
    """
    inputs, s, heads = measurement.inputs, measurement.inputs.settings, len(measurement.layers.units)
    bound = bound_layers(measurement, make_plan(measurement, way.allocation.picks))
    alone, coded = dict[int, Verified](), dict[int, Verified]()
    for stored, verdicts in (("model", alone), (way.stored, coded)):
        if stored == "model" and (verdicts is coded or not bound):
            continue
        for length in s.lengths:
            inputs.refuse_late()
            evidence, verdicts[length] = verdict_at(
                length, inputs, bound, heads, gates, stored=stored, number=number, predicted=predicted[length]
            )
            if not verdicts[length].passed:
                return Proof(alone, coded, evidence.worst(1.0 - s.alpha))
    return Proof(alone, coded, evidence.worst(1.0 - s.alpha))
