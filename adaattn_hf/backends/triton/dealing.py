"""Who computes what: items of work, dealt out to programs that stay resident so that all end at about the same time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_BESIDE_TILES, _EDGE_TILES = 1, 1
"""Tiles that could be computed in the time in which an item begins and ends, about, on an H200, and in that which its
sinks and the edge of its window take longer: what batches of many items take."""
_FEW_TURNS = 8
"""Items of a program, on average, up to which it matters who computes which one."""


def beside_tiles(edges: NDArray[np.bool_] | bool) -> NDArray[np.int64] | int:
    """What items take beside the keys that they read, in tiles; `edges`: whether a window leaves out some of theirs."""
    return _BESIDE_TILES + _EDGE_TILES * edges


def uneven(items: int, programs: int) -> bool:
    """Whether programs of so many items may end at different times, unless these are dealt out evenly."""
    return programs < items <= _FEW_TURNS * programs


def ordered(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Places along the last axis in the order of keys that are not negative; equal ones keep theirs.

    As numpy's `argsort` finds them, several times as fast: numbers are sorted with their places in the lowest bits.
    """
    bits = max(keys.shape[-1] - 1, 1).bit_length()
    order: NDArray[np.int64] = np.sort((keys << bits) | np.arange(keys.shape[-1])) & ((1 << bits) - 1)
    return order


def taken(among: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
    """What is at places `[tables or 1, n]` of each table `[tables, items]`; faster than `np.take_along_axis`."""
    tables, width = among.shape
    found: NDArray[np.int64] = among.ravel().take(places + np.arange(tables)[:, None] * width)
    return found


def turned(count: int, programs: int) -> NDArray[np.int64]:
    """The numbers of so many items, those of most cost first, in rows of as many as there are programs.

    Each program computes a column. Every other row is turned round, so that columns come to about the same, unless each
    has few items. Where a column has no further item stands the number of all items; a single row ends with the last.
    """
    if count <= programs:
        return np.arange(count)
    rows = np.arange(count + -count % programs).reshape(-1, programs)
    rows[1::2] = rows[1::2, ::-1].copy()
    return np.minimum(rows.ravel(), count)


def balanced(cost: NDArray[np.int64], programs: int) -> NDArray[np.int64]:
    """The same of each of some tables `[tables, items]` where columns of few items are to come to about the same.

    The longest items come first in each column.

    Args:
        cost: Of the items, in tiles, `beside_tiles` counted.
        programs: Columns.

    Returns:
        `[tables, rows * programs]`.
    """
    tables, count = cost.shape
    order = ordered(cost.max() - cost)
    place = _places(taken(cost, order), programs)
    slots = np.full((tables, (int(place.max()) // programs + 1) * programs), count)
    slots[np.arange(tables)[:, None], place] = order
    return slots


def _places(cost: NDArray[np.int64], programs: int) -> NDArray[np.int64]:
    """A place for each item `[tables, items]`, those of most cost first."""
    tables = len(cost)
    loads, place = np.zeros((tables, programs), dtype=np.int64), np.empty_like(cost)
    free = np.tile(np.arange(programs), (tables, 1))  # of each column, the first
    numbers = np.arange(tables)[:, None]
    # half a row at a time, the longest item to the column that has least to do
    step = max(programs // 2, 1)
    for begin in range(0, cost.shape[1], step):
        some = cost[:, begin : begin + step]
        least = ordered(loads)[:, : some.shape[1]]
        loads[numbers, least] += some
        place[:, begin : begin + step] = free[numbers, least]
        free[numbers, least] += programs
    return place
