"""Verifies plans on held-out text: paired loss, KL, likeliest tokens, needles and activation rate.

One plan is tested in looks at growing text, until it passes, is hopeless, or the text is used up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

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
from ..policy.aim import Observation
from ..policy.sequential import hopeless, look_levels, look_sizes
from ..stats.paired import Float, Ratio, TokenScores, clustered, clustered_ratio, joined
from .inputs import Inputs
from .layers import Measurement, Picks, bound_layers


@dataclass
class Evidence:
    """Scores of held-out sequences, added up sequence by sequence.

    Attributes:
        names: Document of each sequence.
        sums: Sum of token differences of each sequence.
        tokens: Scored tokens of each sequence.
        kl: KL of every token.
        sources: Source of each sequence.
        agree: Tokens with the same likeliest token.
        needles: For each needle whether stock attention finds it, and whether the plan does.
        apart: Whether the loss of every source must keep the budget by itself; all else is counted over all of them.
    """

    names: list[str] = field(default_factory=list)
    sums: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    kl: list[Float] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    agree: int = 0
    needles: list[tuple[bool, bool]] = field(default_factory=list)
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
        mine = [place for place, own in enumerate(self.sources) if source in (None, own)]
        sums, tokens = [self.sums[place] for place in mine], [self.tokens[place] for place in mine]
        return clustered_ratio(*clustered([self.names[place] for place in mine], sums, tokens))

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

    def observed(self, kl: float) -> Observation:
        """Returns these sequences as an observation of loss per KL; `kl` is that on calibration text, nats/token."""
        deltas = np.array(self.sums) / np.array(self.tokens, dtype=np.float64)
        return Observation(kl, deltas, tuple(self.sources))


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
        return joined([compare(arms, window, tap) for window in inputs.windows(sequence, seed)])

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
    tries: int,
    activation_share: tuple[float, float],
    predicted: float,
) -> Verified:
    """Returns the verdict on the evidence; `confidence` is the bound's level, corrected for the number of tries."""
    worst, tokens = evidence.worst(confidence), sum(evidence.tokens)
    upper, mean, tail = worst.upper(confidence), evidence.mean_kl(), np.quantile(np.concatenate(evidence.kl), 0.999)
    top1 = evidence.agree / max(tokens, 1)
    by_stock, by_plan = np.mean(evidence.needles, axis=0).tolist() if evidence.needles else (None, None)
    found = Verified(
        passed=False,
        delta_nll=worst.mean,
        upper=upper,
        confidence=confidence,
        tries=tries,
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
    reasons = gates.refusals(found)
    if reasons:
        return replace(found, sentence=f"failed: {'; '.join(reasons)}")
    gate, used = gates.nearest(upper, mean, top1)
    nearest = f"{words(found, gates.budget)}; nearest to its limit: {gate}, at {share(used)}"
    return replace(found, passed=True, sentence=nearest)


@dataclass(frozen=True, eq=False)
class Proof:
    """The verdicts of held-out text on a plan, and its evidence, both by length.

    Lengths after one that failed were not tested. `lost` says whether a limit other than that of the loss failed.
    """

    verdicts: Mapping[int, Verified]
    evidence: Mapping[int, Evidence]
    lost: bool = False

    @property
    def passed(self) -> bool:
        """Whether every length passed."""
        return all(verdict.passed for verdict in self.verdicts.values())

    @property
    def worst(self) -> Verified:
        """The verdict that failed, or the one with the largest bound."""
        return max(self.verdicts.values(), key=lambda verdict: (not verdict.passed, verdict.upper))


@dataclass(frozen=True)
class Test:
    """How a plan is tested, as the `number`-th, over a cache of the format `stored`.

    `level` is the error rate of all looks at one length: a plan must pass at every one. KL is predicted in nats/token.
    """

    gates: Gates
    level: float
    number: int
    predicted: Mapping[int, float]
    stored: str = "model"


def prove(measurement: Measurement, picks: Picks, shards: Mapping[int, Sequence[TokenSequence]], test: Test) -> Proof:
    """Returns the verdicts on an allocation.

    `shards` are held-out sequences by length that were not used before, as many as the last look needs.
    """
    verdicts: dict[int, Verified] = {}
    gathered: dict[int, Evidence] = {}
    by_layer = bound_layers(measurement, picks)
    for length, shard in shards.items():
        verdicts[length], gathered[length], lost = _length(measurement, by_layer, length, shard, test)
        if not verdicts[length].passed:
            break
    return Proof(verdicts, gathered, lost)


def _length(
    measurement: Measurement,
    by_layer: Mapping[int, BoundLayer],
    length: int,
    shard: Sequence[TokenSequence],
    test: Test,
) -> tuple[Verified, Evidence, bool]:
    inputs = measurement.inputs
    s, tap = inputs.settings, stored_tap(by_layer, test.stored)
    sizes = look_sizes(min(s.held_out, len(shard)), len(shard))
    levels = look_levels(test.level, sizes)
    haystacks = s.haystacks if inputs.scoring.generates else 0
    total, evidence = sizes[-1] + haystacks, Evidence(apart=inputs.other_source)
    share = activation(by_layer, len(measurement.layers.units), length, inputs.scoring.causal)

    def step(done: int) -> None:
        inputs.run.progress(f"verify {length}", min(done, total), total)

    for start, size, level in zip([0, *sizes], sizes, levels, strict=False):
        inputs.refuse_late()
        step(start)
        evidence = gather(
            inputs, tap, shard[start:size], evidence, s.seed + test.number, 0 if start else haystacks, step
        )
        verdict = judge(
            evidence,
            test.gates,
            confidence=1.0 - level,
            tries=test.number,
            activation_share=share,
            predicted=test.predicted[length],
        )
        # what fails whatever the budget will not pass a later look
        lost = test.gates.beside_the_loss(verdict.top1, *compared(evidence.needles))
        if lost and size < sizes[-1]:  # an early look's bound is of a level so high that it says nothing of the loss
            verdict = replace(verdict, sentence=f"failed: {'; '.join(lost)}")
        if verdict.passed or lost or hopeless(evidence.ratio(), test.gates.budget, sizes, size, levels[-1]):
            break
    step(total)
    return verdict, evidence, bool(lost)
