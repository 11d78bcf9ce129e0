"""Who computes what: items of work, dealt out to programs that stay resident so that all end at about the same time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_BESIDE_TILES, _EDGE_TILES = 1, 1
"""Tiles that could be computed in the time in which an item begins and ends, about, on an H200, and in that which its
sinks and the edge of its window take longer: what batches of many items take."""
_FEW_TURNS = 8
"""Items of a program, on average, up to which it matters who computes which one."""
_MOST_SWAPS, _TIES, _EVEN = 256, 4, 1.01
"""Exchanges at most, kinds of items of one cost, and what the fullest column may have, in means of all."""
_WORTH = 0.004
"""By how much an exchange must relieve the fullest column, in means: windows of many kinds leave less to gain than the
host takes to find it, once for each layer of a plan."""


def beside_tiles(edges: NDArray[np.bool_] | bool) -> NDArray[np.int64] | int:
    """What items take beside the keys that they read, in tiles; `edges`: whether a window leaves out some of theirs."""
    return _BESIDE_TILES + _EDGE_TILES * edges


def uneven(items: int, programs: int) -> bool:
    """Whether programs of so many items may end at different times, unless these are dealt out evenly."""
    return programs < items <= _FEW_TURNS * programs


def dealt(
    entries: NDArray[np.int32], costs: NDArray[np.int64], parts: int, programs: int, evenly: bool
) -> NDArray[np.int32]:
    """The items of all entries, in rows of as many as there are programs: each computes a column.

    Args:
        entries: `[entries, 3]`: segment, first row, key/value head; those of most cost come about first.
        costs: `[entries]`, in tiles, `beside_tiles` counted.
        parts: Items of an entry, numbered on from those of the head before.
        programs: Columns.
        evenly: Exchange items of few turns until programs end together, which takes several times as long: as long as
            some hundred launches gain by it.

    Returns:
        `[items, 3]`: segment, first row, number of the part, -1 where a column has no further item.
    """
    items, cost = entries, costs
    if parts > 1:
        items, cost = entries.repeat(parts, axis=0), costs.repeat(parts)
        items[:, 2] = items[:, 2] * parts + np.tile(np.arange(parts, dtype=np.int32), len(entries))
    if len(items) <= programs:
        return items
    none = np.array([0, 0, -1], dtype=np.int32)
    if not uneven(len(items), programs):
        # every other row is turned round, so that columns come to about the same
        missing = -len(items) % programs
        rows = np.concatenate([items, np.tile(none, (missing, 1))]).reshape(-1, programs, 3)
        rows[1::2] = rows[1::2, ::-1].copy()
        return rows.reshape(-1, 3)
    order = np.argsort(-cost, kind="stable")
    items, cost = items.take(order, axis=0), cost[order]
    # items of the same cost, told apart: an exchange has something to gain then, where whole tiles would leave nothing
    cost = cost * (4 * _TIES) + np.arange(len(cost)) % _TIES
    column = _columns(cost, programs, _MOST_SWAPS if evenly else 0)
    counts = np.bincount(column, minlength=programs)
    order = np.argsort(column, kind="stable")
    place = np.arange(len(items)) - np.repeat(counts.cumsum() - counts, counts)
    rows = np.empty((int(counts.max()) * programs, 3), dtype=np.int32)
    rows[:] = none
    rows[place * programs + column[order]] = items.take(order, axis=0)
    return rows


def _columns(cost: NDArray[np.int64], programs: int, swaps: int) -> NDArray[np.int64]:
    """A column for each item, those of most cost first; exchanges leave the fullest one little more than the others."""
    loads, column = np.zeros(programs, dtype=np.int64), np.empty(len(cost), dtype=np.int64)
    # half a row at a time, the longest item to the column that has least to do
    step = max(programs // 2, 1)
    for begin in range(0, len(cost), step):
        some = cost[begin : begin + step]
        least = np.argsort(loads, kind="stable")[: len(some)]
        loads[least] += some
        column[begin : begin + step] = least
    # then an item of the fullest column for a shorter one of another, as long as the larger sum falls by enough
    mean = cost.sum() / programs
    for _ in range(swaps):
        fullest = int(loads.argmax())
        if loads[fullest] <= _EVEN * mean:
            break
        mine = np.flatnonzero(column == fullest)
        less = cost[mine, None] - cost
        larger = np.maximum(loads[fullest] - less, loads[column] + less)
        larger[:, mine] = loads[fullest]
        best = int(larger.argmin())
        if larger.flat[best] > loads[fullest] - _WORTH * mean:
            break
        one, other = int(mine[best // len(cost)]), best % len(cost)
        loads[[fullest, column[other]]] += cost[[other, one]] - cost[[one, other]]
        column[[one, other]] = column[[other, one]]
    return column
