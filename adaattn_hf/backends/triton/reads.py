"""How much each block of queries or of keys reads, under the windows that its heads have."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...attention.structure import Segment
from .dealing import ordered

_RANKS = 16
"""Classes of cost, from none to the largest, within which entries are ordered by head."""


class Blocks:
    """The blocks of queries, or of keys, of some runs, and what they read: found once for all heads of all layers.

    Attributes:
        runs: int32 `[runs, 6]`, as kernels take them.
        segment: int64 `[blocks]`, the run that each is of.
        first: int64 `[blocks]`, its first row in that.
        stands: int64 `[blocks]`, the first row's place among the keys.
        ends: Whether no tile of a run reaches keys behind its own.
    """

    def __init__(
        self, queries: bool, causal: bool, kv_len: int, segments: Sequence[Segment], tile: tuple[int, int]
    ) -> None:
        """Of runs in blocks of `tile`'s queries, which read tiles of its keys, or the other way round.

        Args:
            queries: Whether the blocks are of queries.
            causal: Whether queries see no later key.
            kv_len: Keys of the tensor that the runs lie in.
            segments: The runs.
            tile: Queries and keys of a tile.
        """
        table = np.array(segments, dtype=np.int64).reshape(-1, 6)
        self.runs = table.astype(np.int32)
        block = tile[0] if queries else tile[1]
        self.segment, self.first = _tiles(table[:, 2 if queries else 4], block)
        _, _, self._q_len, _, self._k_len, self._offset = table[self.segment].T
        self.stands = self.first + self._offset
        self.ends = bool(np.all(ends_with_tiles(table[:, 3], table[:, 4], tile[1], kv_len)))
        self._last = np.minimum(self.first + block, self._q_len if queries else self._k_len) - 1
        self._queries, self._causal, self._columns = queries, causal, tile[1]
        self._known: dict[tuple[int, int], tuple[NDArray[np.int64], int]] = {}

    def read(self, window: int, sinks: int) -> tuple[NDArray[np.int64], int]:
        """What each block of a head with a window reads, keys for queries and queries for keys, and all of them."""
        known = self._known.get((window, sinks))
        if known is None:
            each = self._of_queries(window, sinks) if self._queries else self._of_keys(window, sinks)
            known = self._known[window, sinks] = each, int(each.sum())
        return known

    def _of_queries(self, window: int, sinks: int) -> NDArray[np.int64]:
        start = np.maximum(self.first + (self._offset - window + 1), 0) // self._columns * self._columns
        stop = np.minimum(self._k_len, self._last + (self._offset + (1 if self._causal else window)))
        read: NDArray[np.int64] = np.maximum(stop - start, 0) + np.minimum(sinks, start)
        return read

    def _of_keys(self, window: int, sinks: int) -> NDArray[np.int64]:
        start = np.maximum(self.first - (self._offset + (0 if self._causal else window - 1)), 0)
        stop = np.where(
            self.first < sinks, self._q_len, np.minimum(self._q_len, self._last + window - self._offset)
        )
        read: NDArray[np.int64] = np.maximum(stop - start, 0)
        return read

    def longest_first(self, costs: NDArray[np.int64]) -> NDArray[np.int64]:
        """The order of the blocks of all heads, as `places` numbers them, those of most cost first.

        Blocks of about the same cost are ordered by head: programs that run at the same time then read the same keys.

        Args:
            costs: `[tables, kv_heads, blocks]`, what `read` returned for each head.

        Returns:
            `[tables, kv_heads * blocks]`.
        """
        tables, heads, count = costs.shape
        cost = costs.reshape(tables, -1)
        most = cost.max(axis=1, initial=0, keepdims=True)
        # one number says class, head and cost in turn, as it sorts faster than three
        rank = _RANKS - (cost * (_RANKS / np.maximum(most, 1))).astype(np.int64)
        return ordered((rank * heads + np.arange(heads).repeat(count)) * (most + 1) + (most - cost))

    def places(self, heads: int) -> NDArray[np.int32]:
        """Segment, first row and head of the blocks of all heads, `[heads * blocks + 1, 3]`; -1 is the last one's head.

        That one stands for none.
        """
        found = np.zeros((heads * len(self.first) + 1, 3), dtype=np.int32)
        each = found[:-1].reshape(heads, -1, 3)
        each[..., 0], each[..., 1], each[..., 2] = self.segment, self.first, np.arange(heads)[:, None]
        found[-1, 2] = -1
        return found


def ends_with_tiles(
    start: NDArray[np.int64] | int, length: NDArray[np.int64] | int, columns: int, kv_len: int
) -> NDArray[np.bool_] | bool:
    """Whether no tile of a run's keys reaches those behind them, of which a tensor has `kv_len`; of one run or many."""
    ends: NDArray[np.bool_] | bool = (length % columns == 0) | (start + length == kv_len)
    return ends


def _tiles(lengths: NDArray[np.int64], block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Segment and first row of every tile."""
    counts = -(-lengths // block)
    segment = np.repeat(np.arange(len(lengths)), counts)
    before = np.repeat(counts.cumsum() - counts, counts)
    return segment, (np.arange(len(segment)) - before) * block
