"""Turns the rules of a `MaskStructure` into contiguous runs of queries and keys, on the host."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .structure import MaskStructure

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


def _real_runs(padding: Tensor) -> list[Run] | None:
    # per row of `[rows, length]`, empty where there is none; None if a row has holes
    framed = torch.constant_pad_nd(padding, (1, 1))
    borders = (framed[:, 1:] != framed[:, :-1]).nonzero().tolist()  # where a run begins, and where it ends
    runs = [(0, 0)] * padding.shape[0]
    for (row, begin), (_, end) in zip(borders[::2], borders[1::2], strict=True):
        if runs[row][1]:
            return None
        runs[row] = begin, end
    return runs


def _document_runs(ids: Tensor) -> list[dict[int, Run]] | None:
    # per row of `[rows, length]` the run of each number, in order; None if one comes back after another
    new = torch.ones_like(ids, dtype=torch.bool)
    new[:, 1:] = ids[:, 1:] != ids[:, :-1]
    rows, starts = new.nonzero(as_tuple=True)
    begins = starts.tolist()
    stops = (after or ids.shape[1] for after in [*begins[1:], 0])  # after a row's last run another row begins, at 0
    runs: list[dict[int, Run]] = [{} for _ in range(ids.shape[0])]
    for row, begin, stop, number in zip(rows.tolist(), begins, stops, ids[rows, starts].tolist(), strict=False):
        if number in runs[row]:
            return None
        runs[row][number] = begin, stop
    return runs


def find_segments(structure: "MaskStructure") -> tuple[Segment, ...] | None:
    """The runs of a structure, ordered by batch row and query; None if padding or documents do not describe runs.

    A query that belongs to no run sees nothing. `MaskStructure.segments` knows of the rules that never do.
    """
    offset, q_len, kv_len, causal = structure.offset(), structure.q_len, structure.kv_len, structure.causal
    padding = structure.padding_on_host()
    segments: list[Segment] = []
    real = None if padding is None else _real_runs(padding)
    if real is None and padding is not None:
        return None
    if real is not None and structure.one_run_a_row:  # every pass over a padded batch comes here
        for row, (low, high) in enumerate(real):
            start = max(low - offset, 0) if causal else 0
            high = min(high, q_len + offset) if causal else high
            if q_len > start and high > low:
                segments.append(Segment(row, start, q_len - start, low, high - low, start + offset - low))
        return tuple(segments)
    starts = None if structure.chunk_start is None else structure.on_host(structure.chunk_start).tolist()
    documents = [[((0, q_len), (0, kv_len))]]
    if structure.k_segments is not None:
        of_keys = of_queries = _document_runs(structure.on_host(structure.k_segments))
        if structure.q_segments is not None and structure.q_segments is not structure.k_segments:
            of_queries = _document_runs(structure.on_host(structure.q_segments))
        if of_keys is None or of_queries is None:
            return None
        rows = max(len(of_queries), len(of_keys))  # either may be one row for the whole batch
        of_queries, of_keys = (runs * rows if len(runs) == 1 else runs for runs in (of_queries, of_keys))
        documents = [
            [(queries[number], run) for number, run in keys.items() if number in queries]
            for queries, keys in zip(of_queries, of_keys, strict=True)
        ]
    for row in range(structure.batch):
        low, high = (0, kv_len) if real is None else real[row]
        for (q_low, q_high), (k_low, k_high) in documents[row if len(documents) > 1 else 0]:
            begin, k_low, k_high = k_low, max(k_low, low), min(k_high, high)
            pieces = [(q_low, q_high, k_low, k_high)]
            if structure.chunk is not None:
                # a document's chunks count from its first key, even if that is padding
                origin = begin if structure.k_segments is not None else (0 if starts is None else starts[row])
                pieces = _chunks(structure.chunk, origin, offset, (q_low, q_high), (k_low, k_high))
            for a, b, c, d in pieces:
                if causal:
                    # keys after the last query and queries before the first key see nothing of one another
                    a, d = max(a, c - offset), min(d, b + offset)
                a, b = max(a, 0), min(b, q_len)
                if b > a and d > c:
                    segments.append(Segment(row, a, b - a, c, d - c, a + offset - c))
    return tuple(segments)


def _chunks(chunk: int, origin: int, offset: int, q: Run, k: Run) -> list[tuple[int, int, int, int]]:
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
