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
from typing import Any

from adaattn_hf.patches.observe import monitoring

WATCHED_BATCHES = 32
Counts = tuple[int, int]
"""(token, head) pairs of attention calls, and those of them that were not exact."""


def is_watched(batch: int, batches: int) -> bool:
    """Whether a batch is one of those on which activation is counted."""
    return batch % max(1, -(-batches // WATCHED_BATCHES)) == 0


def watch(model: Any, call: Callable[[], object]) -> Counts:
    """The pairs of one forward pass of a model that carries a plan."""
    with monitoring.monitoring(model, sample_rows=False):
        call()
    layers = monitoring.statistics(model)
    return sum(layer["pairs"] for layer in layers), sum(layer["changed"] for layer in layers)


def rate(implementation: str, planned: bool, counted: Sequence[Counts | None]) -> dict[str, Any]:
    """An arm's rate over the batches of a run, or the reason why it has none; None stands for an unwatched batch."""
    watched = [counts for counts in counted if counts is not None]
    pairs, changed = (sum(one[place] for one in watched) for place in (0, 1))
    entry: dict[str, Any] = dict.fromkeys(("rate", "reason", "pairs", "batches"))
    if not implementation.startswith("adaattn"):
        return {**entry, "reason": "it is not the plug-in's"}
    if not planned:
        why = "the model carries no plan, and without one nothing but exact attention runs"
        return {**entry, "rate": 0.0, "reason": why}
    if not pairs:
        return {**entry, "reason": "no attention call was counted"}
    return {"rate": changed / pairs, "reason": None, "pairs": pairs, "batches": len(watched)}
