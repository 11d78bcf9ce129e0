"""From the rules of a `CallStructure` to contiguous runs of queries and keys, on the host."""

from __future__ import annotations

import itertools
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Segment", "find_segments"]

Run = tuple[int, int]


class Segment(NamedTuple):
    """A run of queries that sees a run of keys of one batch row, by causality, window and sinks alone.

    Local query `i` stands at local key index `i + offset`.
    """

    row: int
    q_start: int
    q_len: int
    k_start: int
    k_len: int
    offset: int


class Rules(Protocol):
    """What is read of a `CallStructure`, which says what each means."""

    batch: int
    q_len: int
    kv_len: int
    causal: bool
    window: int | None
    sinks: int
    chunk: int | None
    chunk_start: Tensor | None
    key_padding: Tensor | None
    pads_queries: bool
    q_segments: Tensor | None
    k_segments: Tensor | None
    spans: Tensor | None
    mask: Tensor | None

    def offset(self) -> int:
        """Key index of query 0."""

    def padding_on_host(self) -> Tensor | None:
        """`key_padding` in the host's memory."""


def _runs(ids: NDArray[np.int64]) -> list[Run]:
    """Half-open runs of equal numbers; empty if a number comes back after another one."""
    edges = np.flatnonzero(np.diff(ids)) + 1
    bounds = [0, *edges.tolist(), len(ids)]
    runs = list(itertools.pairwise(bounds))
    if len({int(ids[a]) for a, _ in runs}) != len(runs):
        return []
    return runs


def find_segments(structure: Rules) -> tuple[Segment, ...] | None:
    """The runs of a structure, ordered by batch row and query; None if the rules do not describe runs.

    A query that belongs to no run sees nothing.
    """
    if structure.spans is not None or structure.mask is not None:
        return None
    if structure.window is not None and structure.sinks:
        # sinks count from the start of the sequence, which a chunk or a document cut short by padding does not hold
        trimmed = structure.k_segments is not None and structure.key_padding is not None
        if structure.chunk is not None or trimmed:
            return None
    offset, q_len, kv_len = structure.offset(), structure.q_len, structure.kv_len
    own = structure.padding_on_host()
    padding = None if own is None else own.numpy()
    starts = None if structure.chunk_start is None else structure.chunk_start.cpu().numpy()
    documents = _documents(structure)
    if documents is None:
        return None
    found: list[Segment] = []
    for row in range(structure.batch):
        low, high = 0, kv_len
        if padding is not None:
            real = np.flatnonzero(padding[row])
            if len(real) == 0:
                continue
            low, high = int(real[0]), int(real[-1]) + 1
            if high - low != len(real):
                return None
        for (q_low, q_high), (k_low, k_high) in documents[row if len(documents) > 1 else 0]:
            k_low, k_high = max(k_low, low), min(k_high, high)
            if structure.pads_queries:
                q_low, q_high = max(q_low, low - offset), min(q_high, high - offset)
            if structure.chunk is None:
                pieces = [(q_low, q_high, k_low, k_high)]
            else:
                origin = (
                    k_low if structure.k_segments is not None else (0 if starts is None else int(starts[row]))
                )
                pieces = _chunks(structure.chunk, origin, offset, (q_low, q_high), (k_low, k_high))
            for a, b, c, d in pieces:
                if structure.causal:
                    # keys behind the last query and queries before the first key see nothing of one another
                    a, d = max(a, c - offset), min(d, b + offset)
                a, b = max(a, 0), min(b, q_len)
                if b > a and d > c:
                    found.append(Segment(row, a, b - a, c, d - c, a + offset - c))
    return tuple(found)


def _documents(structure: Rules) -> list[list[tuple[Run, Run]]] | None:
    """Per batch row (or once for all): pairs of query run and key run that belong to one document."""
    whole = [((0, structure.q_len), (0, structure.kv_len))]
    if structure.k_segments is None:
        return [whole]
    k_ids = structure.k_segments.cpu().numpy()
    q_ids = k_ids if structure.q_segments is None else structure.q_segments.cpu().numpy()
    rows: list[list[tuple[Run, Run]]] = []
    for q_row, k_row in zip(q_ids, k_ids, strict=True):
        q_runs, k_runs = _runs(q_row), _runs(k_row)
        if not q_runs or not k_runs:
            return None
        by_id = {int(q_row[a]): (a, b) for a, b in q_runs}
        rows.append([(by_id[int(k_row[a])], (a, b)) for a, b in k_runs if int(k_row[a]) in by_id])
    return rows


def _chunks(chunk: int, origin: int, offset: int, q: Run, k: Run) -> list[tuple[int, int, int, int]]:
    """Split a query run and a key run at chunk borders; pieces that hold queries and keys of one chunk."""
    pieces = []
    first = (min(q[0] + offset, k[0]) - origin) // chunk
    last = (max(q[1] + offset, k[1]) - 1 - origin) // chunk
    for index in range(first, last + 1):
        low, high = origin + index * chunk, origin + (index + 1) * chunk
        a, b = max(q[0], low - offset), min(q[1], high - offset)
        c, d = max(k[0], low), min(k[1], high)
        if b > a and d > c:
            pieces.append((a, b, c, d))
    return pieces
