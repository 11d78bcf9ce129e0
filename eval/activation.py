"""The activation rate: the share of (token, head) pairs in which anything but exact attention ran.

A short evaluation of a plan for long contexts may never leave the exact path, and then proves nothing about the plan.
The rate is not guessed: the plug-in counts, and `adaattn_hf.statistics(model)` is asked before and after. What is read
from its answer is a mapping with

    head_tokens               (token, head) pairs that attention was computed for, all layers together
    approximate_head_tokens   those of them for which something but exact attention ran

An implementation that is not the plug-in's keeps no count, and its rate is None, with the reason beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import adaattn_hf

HEAD_TOKENS = "head_tokens"
APPROXIMATE = "approximate_head_tokens"


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
    """Reads one arm's counters when it is made and again when asked."""

    def __init__(self, model: Any, implementation: str) -> None:
        """Note where the counters of `model` stand."""
        self._model = model
        self._implementation = implementation
        self._start = self._counts()

    def _counts(self) -> Mapping[str, int] | None:
        read = getattr(adaattn_hf, "statistics", None)
        if read is None or not self._implementation.startswith("adaattn"):
            return None
        counts = read(self._model)
        if HEAD_TOKENS not in counts or APPROXIMATE not in counts:
            return None
        return {key: int(counts[key]) for key in (HEAD_TOKENS, APPROXIMATE)}

    def read(self) -> Activation:
        """The rate since this meter was made."""
        if not self._implementation.startswith("adaattn"):
            return Activation(None, f"{self._implementation} is not the plug-in's and keeps no count")
        now = self._counts()
        if now is None or self._start is None:
            return Activation(None, "the installed plug-in keeps no count of approximate (token, head) pairs")
        pairs = now[HEAD_TOKENS] - self._start[HEAD_TOKENS]
        if pairs == 0:
            return Activation(None, "no attention call of the plug-in was counted")
        return Activation((now[APPROXIMATE] - self._start[APPROXIMATE]) / pairs, None, pairs)
