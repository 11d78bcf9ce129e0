"""Verifies one plan in looks at growing held-out text, until it passes, is hopeless, or the text is used up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..attention.tap import Tap
from ..plans.plan import Verified
from ..plans.program import Program
from ..policy.acceptance import Gates
from ..policy.sequential import hopeless, look_levels, look_sizes
from . import needles, verify
from .corpus import TokenSequence
from .inputs import Inputs
from .verify import Evidence


@dataclass(frozen=True, eq=False)
class Proof:
    """The verdicts of held-out text on a plan.

    Attributes:
        verdicts: By length; lengths after one that failed were not tested.
        evidence: By length.
    """

    verdicts: Mapping[int, Verified]
    evidence: Mapping[int, Evidence]

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
    """How a plan is tested.

    Attributes:
        gates: The acceptance criteria.
        level: Error rate of all looks at one length; a plan must pass at every length.
        number: Plans tested so far, including this one.
        predicted: By length: predicted KL, nats/token.
    """

    gates: Gates
    level: float
    number: int
    predicted: Mapping[int, float]


def prove(
    inputs: Inputs,
    programs: Mapping[int, Program],
    heads: Mapping[int, int],
    shards: Mapping[int, Sequence[TokenSequence]],
    test: Test,
    tap: Tap | None = None,
) -> Proof:
    """Returns the verdicts on a plan.

    Args:
        inputs: The model.
        programs: The plan's programs by layer index.
        heads: By layer: key/value heads.
        shards: By length: held-out sequences not used before, as many as the last look needs.
        test: The test.
        tap: Computes the attention of the plan; runs its programs if absent.
    """
    verdicts: dict[int, Verified] = {}
    gathered: dict[int, Evidence] = {}
    for length, shard in shards.items():
        verdicts[length], gathered[length] = _length(inputs, programs, heads, length, shard, test, tap)
        if not verdicts[length].passed:
            break
    return Proof(verdicts, gathered)


def _length(
    inputs: Inputs,
    programs: Mapping[int, Program],
    heads: Mapping[int, int],
    length: int,
    shard: Sequence[TokenSequence],
    test: Test,
    tap: Tap | None,
) -> tuple[Verified, Evidence]:
    """Returns verdict and evidence for one length."""
    s = inputs.settings
    sizes = look_sizes(min(s.held_out, len(shard)), len(shard))
    levels = look_levels(test.level, sizes)
    haystacks = s.haystacks if inputs.scoring.generates else 0
    total, evidence = sizes[-1] + haystacks, Evidence(apart=inputs.other_source)
    share = verify.activation(programs, heads, length, inputs.scoring.causal)
    for look, (size, level) in enumerate(zip(sizes, levels, strict=True)):
        start = sizes[look - 1] if look else 0

        def step(done: int, _: int, start: int = start) -> None:
            inputs.progress(f"verify {length}", min(start + done, total), total)

        step(0, total)
        evidence = verify.gather(
            inputs.arms,
            programs,
            shard[start:size],
            scoring=inputs.scoring,
            haystacks=0 if look else haystacks,
            needles=min(s.needles, needles.most(length)),
            seed=s.seed + test.number,
            step=step,
            before=evidence,
            tap=tap,
        )
        verdict = verify.judge(
            evidence,
            test.gates,
            confidence=1.0 - level,
            tries=test.number,
            activation_share=share,
            predicted=test.predicted[length],
        )
        lost = replace(test.gates, budget=max(verdict.upper, verdict.kl, test.gates.budget)).failures(
            verdict.upper, verdict.kl, verdict.top1, evidence.lost, evidence.won, evidence.found, 0.0
        )
        if verdict.passed or lost or hopeless(evidence.ratio(), test.gates.budget, sizes, size, levels[-1]):
            break
    inputs.progress(f"verify {length}", total, total)
    return verdict, evidence
