"""Which pairs of unit and choice decide a plan: those whose risk, measured better, could change it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .knapsack import Array


def decisive_pairs(
    picks: NDArray[np.int64], prices: Array, risks: Array, budget: Array, count: int
) -> list[tuple[int, int]]:
    """Returns up to `count` pairs (unit, choice): half of them inside a plan, half just outside, unit by unit rising.

    Inside are the picks that take the largest part of the budget. Just outside is, of each unit, the cheaper
    choice that saves most per risk that it adds, best first: the next that a larger budget would buy. Where one
    half has too few pairs the other takes its place.

    Args:
        picks: `[units]`, the plan.
        prices: `[units, choices]`, seconds.
        risks: `[bins, units, choices]`, nats/token.
        budget: `[bins]`, nats/token.
        count: Pairs wanted.
    """
    units = np.arange(len(picks))
    spent = (risks / budget[:, None, None]).max(axis=0)
    own = spent[units, picks]
    inside = [(int(unit), int(picks[unit])) for unit in np.argsort(-own, kind="stable") if own[unit] > 0.0]
    saved, added = prices[units, picks][:, None] - prices, spent - own[:, None]
    worth = np.where((saved > 0) & (added > 0), saved / np.where(added > 0, added, 1.0), 0.0)
    next_best = worth.argmax(axis=1)
    rate = worth[units, next_best]
    outside = [(int(u), int(next_best[u])) for u in np.argsort(-rate, kind="stable") if rate[u] > 0.0]
    within = min(len(inside), max((count + 1) // 2, count - len(outside)))
    return sorted(inside[:within] + outside[: count - within])
