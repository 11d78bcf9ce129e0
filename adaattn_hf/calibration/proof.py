"""Verifies one plan in looks at growing held-out text, until it passes, is hopeless, or the text is used up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..plans.limits import Gates
from ..plans.plan import Verified
from ..plans.program import Program
from ..policy.sequential import hopeless, look_levels, look_sizes
from . import verify
from .arms import stored_tap
from .corpus import TokenSequence
from .measure import Measurement
from .needles import compared
from .search import Picks, programs
from .verify import Evidence


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
    by_layer = programs(measurement, picks)
    for length, shard in shards.items():
        verdicts[length], gathered[length], lost = _length(measurement, by_layer, length, shard, test)
        if not verdicts[length].passed:
            break
    return Proof(verdicts, gathered, lost)


def _length(
    measurement: Measurement, by_layer: Mapping[int, Program], length: int, shard: Sequence[TokenSequence], test: Test
) -> tuple[Verified, Evidence, bool]:
    inputs = measurement.inputs
    s, tap = inputs.settings, stored_tap(by_layer, test.stored)
    sizes = look_sizes(min(s.held_out, len(shard)), len(shard))
    levels = look_levels(test.level, sizes)
    haystacks = s.haystacks if inputs.scoring.generates else 0
    total, evidence = sizes[-1] + haystacks, Evidence(apart=inputs.other_source)
    share = verify.activation(by_layer, len(measurement.layers.units), length, inputs.scoring.causal)

    def step(done: int) -> None:
        inputs.progress(f"verify {length}", min(done, total), total)

    for start, size, level in zip([0, *sizes], sizes, levels, strict=False):
        inputs.refuse_late()
        step(start)
        evidence = verify.gather(
            inputs, tap, shard[start:size], evidence, s.seed + test.number, 0 if start else haystacks, step
        )
        verdict = verify.judge(
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
