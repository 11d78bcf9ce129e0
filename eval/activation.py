"""The activation rate: the share of (token, head) pairs in which anything but exact attention ran.

A short evaluation of a plan for long contexts may never leave the exact path, and then proves nothing about
the plan. The rate is not guessed: the plug-in counts, and `adaattn_hf.statistics(model)` is asked before and
after. What is read from its answer is a mapping with

    head_tokens               (token, head) pairs that attention was computed for, all layers together
    approximate_head_tokens   those of them for which something but exact attention ran

An implementation that is not the plug-in's keeps no count, and its rate is None, with the reason beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import adaattn_hf

HEAD_TOKENS = "head_tokens"
APPROXIMATE = "approximate_head_tokens"


class Counts(NamedTuple):
    """(token, head) pairs of attention calls, and those of them that were not exact."""

    head_tokens: int
    approximate: int


@dataclass(frozen=True)
class Activation:
    """An arm's rate, or why there is none."""

    rate: float | None
    reason: str | None = None
    head_tokens: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """For a report."""
        return {"rate": self.rate, "reason": self.reason, "head_tokens": self.head_tokens}


class Meter:
    """Reads one arm's counters: how far they went since it was last asked."""

    def __init__(self, model: Any, implementation: str) -> None:
        """Note where the counters of `model` stand."""
        self._model = model
        self._ours = implementation.startswith("adaattn")
        self._last = self._counts()

    def _counts(self) -> Counts | None:
        read = getattr(adaattn_hf, "statistics", None)
        if read is None or not self._ours:
            return None
        counts = read(self._model)
        if HEAD_TOKENS not in counts or APPROXIMATE not in counts:
            return None
        return Counts(int(counts[HEAD_TOKENS]), int(counts[APPROXIMATE]))

    def since_last(self) -> Counts | None:
        """What was counted since the meter was made or last asked; None where nothing is counted."""
        now, last = self._counts(), self._last
        self._last = now
        if now is None or last is None:
            return None
        return Counts(now.head_tokens - last.head_tokens, now.approximate - last.approximate)


def rates(roles: Sequence[tuple[str, str]], batches: Sequence[Sequence[Counts | None]]) -> list[Activation]:
    """Each arm's rate over all batches."""
    return [_rate(name, [batch[arm] for batch in batches]) for arm, (_, name) in enumerate(roles)]


def _rate(implementation: str, counted: Sequence[Counts | None]) -> Activation:
    if not implementation.startswith("adaattn"):
        return Activation(None, "it is not the plug-in's and keeps no count")
    known = [c for c in counted if c is not None]
    if len(known) < len(counted):
        return Activation(None, "the installed plug-in keeps no count of approximate (token, head) pairs")
    pairs = sum(c.head_tokens for c in known)
    if pairs == 0:
        return Activation(None, "no attention call of the plug-in was counted")
    return Activation(sum(c.approximate for c in known) / pairs, None, pairs)
