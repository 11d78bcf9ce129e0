"""Measures a plan on held-out text: paired loss, KL, likeliest tokens, needles and activation rate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from ..attention.listeners import Tap
from ..plans.limits import Gates, words
from ..plans.plan import Verified
from ..plans.program import Program
from ..plans.wording import share
from ..policy.aim import Observation
from ..stats.paired import Float, Ratio, TokenScores, clustered, clustered_ratio, joined
from .arms import compare, exact_tap
from .corpus import TokenSequence
from .inputs import Inputs
from .needles import compared, retrieved


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
    arms, crew, before = inputs.arms, inputs.team, len(evidence.names)
    scores: list[TokenScores] = []
    for index in crew.mine(len(sequences)):
        inputs.refuse_late(together=False)
        readings = inputs.scoring.readings(sequences[index].tokens, seed, arms.device)
        scores.append(joined([compare(arms, one, tap) for one in readings]))
        step(before + min(index + crew.size, len(sequences)))
    for sequence, score in zip(sequences, crew.gather(scores, len(sequences)), strict=True):
        evidence.add(sequence.document, score, sequence.source)
    generator = torch.Generator().manual_seed(seed)
    found: list[tuple[tuple[bool, ...], tuple[bool, ...]]] = []
    for index in range(haystacks):
        # drawn by every process, so that all draw the same
        haystack = inputs.haystack(sequences[index % len(sequences)], generator)
        if index in crew.mine(haystacks):
            found.append((retrieved(arms, haystack, exact_tap), retrieved(arms, haystack, tap)))
        step(before + len(sequences) + index + 1)
    for stock, planned in crew.gather(found, haystacks):
        evidence.needles += zip(stock, planned, strict=True)
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
