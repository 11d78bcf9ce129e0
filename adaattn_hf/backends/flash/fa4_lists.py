"""Makes, on the device and by one launch, the lists of blocks that flash-attn 4 reads under windows per head."""

from __future__ import annotations

import functools
import importlib

import torch
from torch import Tensor

from ...attention.structure import CallStructure, Segment

BLOCK = 128
"""Queries and keys per block."""
_CHUNK = 128
"""Blocks that a program looks at together."""

Lists = tuple[Tensor, Tensor, Tensor, Tensor]
"""Counts and ascending indices of the blocks that need the mask, then of those that are seen whole, int32."""


def runs_of(structure: CallStructure, segments: tuple[Segment, ...], device: torch.device) -> Tensor:
    """Int32 `[3, batch, q_len]`: first key of a query's run, the one behind its last, the query's place among keys.

    A query that sees nothing has a run without keys, which begins behind all of them.
    """
    runs = torch.empty((3, structure.batch, structure.q_len), dtype=torch.int32, device="cpu")
    first, stop, place = runs.unbind(0)
    first.fill_(structure.kv_len)
    stop.zero_()
    place.fill_(-1)
    for s in segments:
        rows = slice(s.q_start, s.q_start + s.q_len)
        first[s.row, rows] = s.k_start
        stop[s.row, rows] = s.k_start + s.k_len
        place[s.row, rows] = torch.arange(s.q_len, dtype=torch.int32, device="cpu") + (s.k_start + s.offset)
    return runs.to(device, non_blocking=True)


class BlockLists:
    """The blocks that queries see under the windows and sinks of their heads, and the tables of the mask for borders.

    Bounds per block of queries stand for its rows: a block that is said to be seen in part may hold nothing, one that
    is said to be seen whole is. One launch makes the lists, a second one those by blocks of keys.

    Attributes:
        tables: Windows and sinks, int32 `[heads]`; then the runs' first keys, stops and places, `[batch, q_len]`.
        by_queries: For every block of queries the blocks of keys; counts `[batch, heads, blocks of queries]`, indices
            `[..., blocks of keys]`, whose rest behind the count holds the other blocks. Batch 1 without runs.
    """

    def __init__(
        self, windows: Tensor, groups: int, q_len: int, kv_len: int, causal: bool, runs: Tensor | None = None
    ) -> None:
        """Lists the blocks on the device of the windows.

        Args:
            windows: Int32 `[2, heads]`: windows, then sinks, of the query heads.
            groups: Query heads that follow one another with one key/value head, and so with one window.
            kv_len: Keys. Without runs each query sees all; where calls are causal the last query stands at the last
                key, else the first at the first.
        """
        self.tables = [*windows.unbind(0), *(() if runs is None else runs.unbind(0))]
        self._windows, self._runs, self._groups = windows, runs, groups
        self._q_len, self._kv_len, self._causal = q_len, kv_len, causal
        self._batch = 1 if runs is None else runs.shape[1]
        self._blocks = -(-q_len // BLOCK), -(-kv_len // BLOCK)
        self._bounds = windows.new_empty((6, self._batch, self._blocks[0]))
        self.by_queries = self._listed(*self._blocks, turned=False)

    @functools.cached_property
    def by_keys(self) -> Lists:
        """For every block of keys the blocks of queries, made when a gradient asks for them."""
        queries, keys = self._blocks
        return self._listed(keys, queries, turned=True)

    def _listed(self, own: int, others: int, *, turned: bool) -> Lists:
        windows, heads = self._windows, self._windows.shape[1]
        shape = (self._batch, heads, own)
        made = (
            windows.new_empty(shape),
            windows.new_empty((*shape, others)),
            windows.new_empty(shape),
            windows.new_empty((*shape, others)),
        )
        kernels = importlib.import_module(f"{__package__}.fa4_kernels")
        kernels.listing[(own, heads // self._groups, self._batch)](
            windows if self._runs is None else self._runs, self._bounds, windows, *made,
            self._q_len, self._kv_len, self._kv_len - self._q_len if self._causal else 0,
            PLAIN=self._runs is None, TURNED=turned, CAUSAL=self._causal, COPIES=self._groups, BLOCK=BLOCK,
            CHUNK=_CHUNK, num_warps=1,
        )  # fmt: skip
        return made
