"""The activation rate: the share of (token, head) pairs in which anything but exact attention ran.

A short evaluation of a plan for long contexts may never leave the exact path, and then proves nothing about
the plan. The rate is not guessed. A model without a plan has nothing but exact attention to run: its rate is
0. A model with a plan is watched by `adaattn_hf.patches.observe.monitoring.monitoring`, whose counters are read through
`statistics`: per layer `pairs`, the (token, head) pairs that attention was computed for, and `changed`, those
that the plan computed otherwise. Watching costs time, so it happens in forward passes of its own, outside of
those that are timed, on up to 32 batches that are spread evenly over the run. An implementation that is not
the plug-in's has no rate, with the reason beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from adaattn_hf.patches.plans import attach

WATCHED_BATCHES = 32


class Counts(NamedTuple):
    """(token, head) pairs of attention calls, and those of them that were not exact."""

    pairs: int
    changed: int


@dataclass(frozen=True)
class Activation:
    """An arm's rate, or why there is none, and on how many batches it was counted."""

    rate: float | None
    reason: str | None = None
    pairs: int | None = None
    batches: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """For a report."""
        return asdict(self)


def is_watched(batch: int, batches: int) -> bool:
    """Whether a batch is one of those on which activation is counted."""
    return batch % max(1, -(-batches // WATCHED_BATCHES)) == 0


def has_plan(model: Any, implementation: str) -> bool:
    """Whether an arm may run anything but exact attention."""
    return implementation.startswith("adaattn") and attach.plan_of(model) is not None


def watch(model: Any, call: Callable[[], object]) -> Counts:
    """The pairs of one forward pass of a model that carries a plan."""
    from adaattn_hf.patches.observe import monitoring

    with monitoring.monitoring(model, sample_rows=False):
        call()
    layers = monitoring.statistics(model)
    return Counts(sum(layer["pairs"] for layer in layers), sum(layer["changed"] for layer in layers))


def rate(implementation: str, planned: bool, counted: Sequence[Counts | None]) -> Activation:
    """An arm's rate over the batches of a run; None stands for a batch that was not watched."""
    if not implementation.startswith("adaattn"):
        return Activation(None, "it is not the plug-in's")
    if not planned:
        return Activation(0.0, "the model carries no plan, and without one nothing but exact attention runs")
    known = [counts for counts in counted if counts is not None]
    pairs = sum(counts.pairs for counts in known)
    if pairs == 0:
        return Activation(None, "no attention call was counted")
    return Activation(sum(counts.changed for counts in known) / pairs, None, pairs, len(known))
