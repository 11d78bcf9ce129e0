"""Measures a plan on held-out text: paired loss, KL, likeliest tokens, needles and activation rate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ..attention.tap import Tap
from ..plans.plan import Verified
from ..plans.program import Program
from ..plans.wording import allowed, at_most, in_nats, rise, share, signed_nats
from ..policy.acceptance import Gates, clustered
from ..policy.aim import Observation
from ..stats.paired import Float, Ratio, TokenScores, clustered_ratio
from .arms import compare_all, exact_tap
from .corpus import TokenSequence
from .inputs import Inputs
from .needles import compared, retrieved


@dataclass(frozen=True)
class Bound:
    """Mean of paired loss differences per token, nats, with its one-sided upper confidence bound.

    The bound is infinite with a single cluster.
    """

    mean: float
    upper: float
    clusters: int
    tokens: int


@dataclass
class Evidence:
    """Scores of held-out sequences, added up sequence by sequence.

    Attributes:
        names: Document of each sequence.
        sums: Sum of token differences of each sequence.
        tokens: Scored tokens of each sequence.
        kl: KL of every token.
        agree: Tokens with the same likeliest token.
        lost: Needles found by stock attention and lost by the plan.
        won: Needles that only the plan finds.
        found: Needles that stock attention finds.
        planned: Needles that the plan finds.
        apart: Whether the loss of every source must keep the budget by itself; all else is counted over all of them.
    """

    names: list[str] = field(default_factory=list)
    sums: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    kl: list[Float] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    agree: int = 0
    lost: int = 0
    won: int = 0
    found: int = 0
    planned: int = 0
    needles: int = 0
    apart: bool = False

    def add(self, name: str, scores: TokenScores, source: str = "") -> None:
        """Adds the scores of one sequence."""
        self.names.append(name)
        self.sources.append(source)
        self.sums.append(float(scores.delta[0].sum()))
        self.tokens.append(scores.nll.shape[1])
        self.kl.append(scores.kl[0])
        self.agree += int(scores.agree.sum())

    def add_needles(self, stock: Sequence[bool], planned: Sequence[bool]) -> None:
        """Adds the paired outcomes of one haystack."""
        lost, won, found = compared(stock, planned)
        self.lost += lost
        self.won += won
        self.found += found
        self.planned += sum(planned)
        self.needles += len(stock)

    def bound(self, confidence: float) -> Bound:
        """Returns the upper bound of the loss difference, clustered by document; tokens are those of all sources.

        With `apart` it is the largest bound of any source: all must pass, so each may be tested at the full level
        (an intersection-union test; Berger 1982, Technometrics 24).
        """
        names = self.sources if self.apart else [""] * len(self.names)
        bounds = []
        for source in dict.fromkeys(names):
            mine = [place for place, name in enumerate(names) if name == source]
            sums, tokens = [self.sums[place] for place in mine], [self.tokens[place] for place in mine]
            ratio = clustered_ratio(*clustered([self.names[place] for place in mine], sums, tokens))
            bounds.append(Bound(ratio.mean, ratio.upper(confidence), ratio.clusters, sum(self.tokens)))
        return max(bounds, key=lambda one: one.upper)

    def ratio(self) -> Ratio:
        """Returns the mean loss difference with its error, clustered by document."""
        return clustered_ratio(*clustered(self.names, self.sums, self.tokens))

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
    `seed`; so many `haystacks` are made of the sequences, too; `step` is called with the passes done.
    """
    arms, crew = inputs.arms, inputs.team
    scores: list[TokenScores] = []
    for index in crew.mine(len(sequences)):
        readings = inputs.scoring.readings(sequences[index].tokens, seed, arms.device)
        scores.append(compare_all(arms, readings, tap))
        step(min(index + crew.size, len(sequences)))
    for sequence, score in zip(sequences, crew.gather(scores, len(sequences)), strict=True):
        evidence.add(sequence.document, score, sequence.source)
    generator = torch.Generator().manual_seed(seed)
    found: list[tuple[tuple[bool, ...], tuple[bool, ...]]] = []
    for index in range(haystacks):
        # drawn by every process, so that all draw the same
        haystack = inputs.haystack(sequences[index % len(sequences)], generator)
        if index in crew.mine(haystacks):
            found.append((retrieved(arms, haystack, exact_tap), retrieved(arms, haystack, tap)))
        step(len(sequences) + index + 1)
    for stock, planned in crew.gather(found, haystacks):
        evidence.add_needles(stock, planned)
    return evidence


def activation(programs: Mapping[int, Program], heads: int, length: int, causal: bool) -> tuple[float, float]:
    """Returns the shares of (token, head) pairs at a length that a plan changes, and for which it drops keys.

    `heads` counts the key/value heads of all layers, exact ones too.
    """
    changed = dropped = 0.0
    for program in programs.values():
        within = min(length, program.max_length) if causal else length * (length <= program.max_length)
        for choice in program.plan.choices:
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
    bound = evidence.bound(confidence)
    kl = np.concatenate(evidence.kl)
    mean, tail = float(kl.mean()), float(np.quantile(kl, 0.999))
    top1 = evidence.agree / max(bound.tokens, 1)
    reasons = gates.failures(bound.upper, mean, top1, evidence.lost, evidence.won, evidence.found)
    gate, used = gates.nearest(bound.upper, mean, top1)
    verdict = (
        f"passed: perplexity {rise(bound.mean)}, at most {at_most(bound.upper)}, allowed {allowed(gates.budget)} (Δnll "
        f"{signed_nats(bound.mean)}, at most {signed_nats(bound.upper)} at {share(confidence, 2)}, budget "
        f"{in_nats(gates.budget)} nats/token); nearest to its limit: {gate}, at {share(used)}"
        if not reasons
        else "failed: " + "; ".join(reasons)
    )
    needles = evidence.needles
    return Verified(
        passed=not reasons,
        delta_nll=bound.mean,
        upper=bound.upper,
        confidence=confidence,
        tries=tries,
        documents=bound.clusters,
        tokens=bound.tokens,
        kl=mean,
        kl_p999=tail,
        top1=top1,
        retrieval_stock=evidence.found / needles if needles else None,
        retrieval_plan=evidence.planned / needles if needles else None,
        activation=activation_share[0],
        activation_keys=activation_share[1],
        predicted_kl=predicted,
        sentence=verdict,
    )
