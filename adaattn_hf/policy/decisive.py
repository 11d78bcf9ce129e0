"""Selects the (unit, choice) pairs whose risk, if measured more accurately, could change the plan."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .knapsack import Array


def decisive_pairs(
    picks: NDArray[np.int64], prices: Array, risks: Array, budget: Array, count: int
) -> list[tuple[int, int]]:
    """Returns up to `count` pairs (unit, choice), sorted by unit: half from the plan, half next to it.

    From the plan come the picks that use the largest share of the budget. Next to it is, for each unit, the cheaper
    choice that saves most time per added risk: what a larger budget would buy next. If one half has too few pairs, the
    other fills up.

    Args:
        picks: `[units]`, the plan.
        prices: `[units, choices]`, seconds.
        risks: `[bins, units, choices]`, nats/token.
        budget: `[bins]`, nats/token.
        count: Number of pairs.
    """
    units = np.arange(len(picks))
    spent = (risks / budget[:, None, None]).max(axis=0)
    picked = spent[units, picks]
    largest = np.argsort(-picked, kind="stable")
    inside = [(int(unit), int(picks[unit])) for unit in largest if picked[unit] > 0.0]
    saved, added = prices[units, picks][:, None] - prices, spent - picked[:, None]
    worth = np.where((saved > 0) & (added > 0), saved / np.where(added > 0, added, 1.0), 0.0)
    next_best = worth.argmax(axis=1)
    rate = worth[units, next_best]
    outside = [(int(u), int(next_best[u])) for u in np.argsort(-rate, kind="stable") if rate[u] > 0.0]
    within = min(len(inside), max((count + 1) // 2, count - len(outside)))
    return sorted(inside[:within] + outside[: count - within])
