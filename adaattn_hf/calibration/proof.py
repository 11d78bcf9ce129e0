"""Judges plans by held-out text: paired loss, KL, likeliest tokens, needles and activation rate, in one judgement."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from adaattn_hf.eval.arms import compare, exact_tap, stored_tap
from adaattn_hf.eval.needles import compared, retrieved
from adaattn_hf.eval.windows import TokenSequence

from ..attention.listeners import Tap
from ..plans.bound_layer import BoundLayer
from ..plans.limits import Gates, words
from ..plans.plan import Verified
from ..plans.wording import share
from ..stats.paired import Float, Ratio, TokenScores, clustered, clustered_ratio, joined, student_quantile
from .inputs import Inputs
from .layers import Measurement, bound_layers
from .search import Way


@dataclass
class Evidence:
    """Scores of held-out sequences, added up sequence by sequence.

    With `apart` the loss of every source must keep the budget by itself; all else is counted over all of them.
    """

    names: list[str] = field(default_factory=list)  # the document of each sequence
    sums: list[float] = field(default_factory=list)  # of token differences, by sequence
    tokens: list[int] = field(default_factory=list)  # scored ones, by sequence
    kl: list[Float] = field(default_factory=list)  # of every token
    sources: list[str] = field(default_factory=list)
    agree: int = 0  # tokens with the same likeliest token
    needles: list[tuple[bool, bool]] = field(default_factory=list)  # whether stock attention finds it, and the plan
    apart: bool = False

    def add(self, name: str, scores: TokenScores, source: str = "") -> None:
        """Adds the scores of one sequence."""
        self.names.append(name)
        self.sources.append(source)
        self.sums.append(float(scores.delta[0].sum()))
        self.tokens.append(scores.nll.shape[1])
        self.kl.append(scores.kl[0])
        self.agree += int(scores.agree.sum())

    def ratio(self, source: str | None = None) -> Ratio:
        """Returns the mean loss difference with its error, clustered by document, of one source or of all."""
        places = [place for place, its_source in enumerate(self.sources) if source in (None, its_source)]
        sums, tokens = [self.sums[place] for place in places], [self.tokens[place] for place in places]
        return clustered_ratio(*clustered([self.names[place] for place in places], sums, tokens))

    def worst(self, confidence: float) -> Ratio:
        """Returns the loss difference whose upper bound decides: with `apart` that of the source with the largest.

        All sources must pass, so each may be tested at the full level (an intersection-union test; Berger 1982,
        Technometrics 24).
        """
        apart: Iterable[str | None] = dict.fromkeys(self.sources) if self.apart else (None,)
        return max(map(self.ratio, apart), key=lambda one: one.upper(confidence))

    def mean_kl(self) -> float:
        """Returns the mean KL, nats/token."""
        return float(np.concatenate(self.kl).mean())


def gather(
    inputs: Inputs,
    tap: Tap,
    sequences: Sequence[TokenSequence],
    evidence: Evidence,
    seed: int,
    haystacks: int = 0,
    step: Callable[[int], None] = lambda _: None,
) -> Evidence:
    """Adds the scores of held-out sequences, each of its own length, to earlier evidence on a plan; returns it.

    Both arms, exact attention and the plan's `tap`, read the same tokens. Needles and masked positions are drawn by
    `seed`; so many `haystacks` are made of the sequences, too; `step` is called with the passes done, earlier ones
    included.
    """
    arms, before = inputs.arms, len(evidence.names)

    def scored(sequence: TokenSequence) -> TokenScores:
        inputs.refuse_late(together=False)
        return joined([compare(arms, window, tap, exact) for window, exact in inputs.exact(sequence, seed)])

    for sequence, score in zip(sequences, inputs.team.work(sequences, scored), strict=True):
        evidence.add(sequence.document, score, sequence.source)
        step(len(evidence.names))
    generator = torch.Generator().manual_seed(seed)
    # drawn by every process, so that all draw the same
    made = [inputs.haystack(sequences[index % len(sequences)], generator) for index in range(haystacks)]
    both = inputs.team.work(made, lambda one: (retrieved(arms, one, exact_tap), retrieved(arms, one, tap)))
    for number, (stock, planned) in enumerate(both, 1):
        evidence.needles += zip(stock, planned, strict=True)
        step(before + len(sequences) + number)
    return evidence


def activation(bound_layers: Mapping[int, BoundLayer], heads: int, length: int, causal: bool) -> tuple[float, float]:
    """Returns the shares of (token, head) pairs at a length that a plan changes, and for which it drops keys.

    `heads` counts the key/value heads of all layers, exact ones too.
    """
    changed = dropped = 0.0
    for bound_layer in bound_layers.values():
        within = min(length, bound_layer.max_length) if causal else length * (length <= bound_layer.max_length)
        for choice in bound_layer.plan.choices:
            dropped += choice.rows_with_fewer_keys(0, within, length, causal)
            changed += choice.changed_rows(0, within, length, causal)
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
    upper, mean, tail = worst.upper(confidence), evidence.mean_kl(), np.quantile(np.concatenate(evidence.kl), 0.999)
    top1 = evidence.agree / max(tokens, 1)
    by_stock, by_plan = np.mean(evidence.needles, axis=0).tolist() if evidence.needles else (None, None)
    verdict = Verified(
        passed=False,
        delta_nll=worst.mean,
        upper=upper,
        confidence=confidence,
        tries=number,
        documents=worst.clusters,
        tokens=tokens,
        kl=mean,
        kl_p999=float(tail),
        top1=top1,
        retrieval_stock=by_stock,
        retrieval_plan=by_plan,
        activation=activation_share[0],
        activation_keys=activation_share[1],
        predicted_kl=predicted,
        sentence="",
        needles=len(evidence.needles),
        needles_lost=compared(evidence.needles)[0],
    )
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


def prove(measurement: Measurement, way: Way, predicted: Mapping[int, float], gates: Gates, number: int) -> Proof:
    """Returns the verdicts of all held-out text on the `number`-th candidate, at the full level.

    It must pass at every length, alone and over its cache's format, so each is tested at the full level (an
    intersection-union test). KL is predicted by length, nats/token.
    """
    inputs, s = measurement.inputs, measurement.inputs.settings
    haystacks = s.haystacks if inputs.scoring.generates else 0
    bound, alone, coded = bound_layers(measurement, way.allocation.picks), dict[int, Verified](), dict[int, Verified]()

    def step(length: int, done: int) -> None:
        inputs.run.progress(f"verify {length}", done, len(inputs.samples[length].held_out) + haystacks)

    for stored, verdicts in (("model", alone), (way.stored, coded)):
        if stored == "model" and (verdicts is coded or not bound):
            continue
        for length in s.lengths:
            inputs.refuse_late()
            step(length, 0)
            # one seed: masked positions and needles are the same for all candidates, as the text is
            evidence = gather(
                inputs, stored_tap(bound, stored), inputs.samples[length].held_out,
                Evidence(apart=inputs.other_source), s.seed + 1, haystacks, partial(step, length),
            )  # fmt: skip
            share = activation(bound, len(measurement.layers.units), length, inputs.scoring.causal)
            verdicts[length] = judge(
                evidence, gates, confidence=1.0 - s.alpha, number=number, activation_share=share,
                predicted=predicted[length],
            )  # fmt: skip
            if not verdicts[length].passed:
                return Proof(alone, coded, evidence.worst(1.0 - s.alpha))
    return Proof(alone, coded, evidence.worst(1.0 - s.alpha))
