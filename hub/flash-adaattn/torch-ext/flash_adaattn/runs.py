"""Sequences of different lengths as runs of queries and keys, each aligned at its own end."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from .attention.structure import CallStructure, Segment

__all__ = ["Runs", "packed_runs"]


@dataclass(eq=False)
class Runs(CallStructure):
    """A structure that is made of runs from the start, where one offset for all would not say it.

    Attributes:
        runs: `causal` and `window` hold within each; a query of no run sees nothing.
    """

    runs: tuple[Segment, ...] = ()

    @property
    def plain(self) -> bool:
        """Never: the runs say what is visible."""
        return False

    def segments(self) -> tuple[Segment, ...]:
        """The runs."""
        return self.runs

    def visible(
        self, start: int = 0, stop: int | None = None, *, device: torch.device | str = "cpu"
    ) -> Tensor:
        """Boolean `[batch, 1, stop - start, kv_len]`: True where the query sees the key."""
        stop = self.q_len if stop is None else stop
        keep = torch.zeros(self.batch, 1, self.q_len, self.kv_len, dtype=torch.bool, device=device)
        for run in self.runs:
            p = torch.arange(run.q_len, device=device)[:, None] + run.offset
            j = torch.arange(run.k_len, device=device)[None]
            seen = torch.ones(run.q_len, run.k_len, dtype=torch.bool, device=device)
            if self.causal:
                seen = seen & (j <= p)
            if self.window is not None:
                seen = seen & ((j > p - self.window) if self.causal else ((p - j).abs() < self.window))
            keep[run.row, 0, run.q_start : run.q_start + run.q_len, run.k_start : run.k_start + run.k_len] = (
                seen
            )
        return keep[:, :, start:stop]


@functools.lru_cache(maxsize=64)
def packed_runs(
    cu_q: tuple[int, ...], cu_k: tuple[int, ...], q_total: int, k_total: int, causal: bool, window: int | None
) -> Runs:
    """Documents packed one behind the other in one row; the last query of each stands at its last key.

    Args:
        cu_q, cu_k: `documents + 1` running sums of lengths, starting with 0.
        q_total, k_total: Tokens that there are; those behind the last document belong to none.
        causal, window: Hold within each document.

    Raises:
        ValueError: The sums do not start with 0, fall, or go beyond the tokens.
    """
    if len(cu_q) != len(cu_k):
        raise ValueError(
            f"cu_seqlens_k: got {len(cu_k)} entries, expected as many as cu_seqlens_q has, {len(cu_q)}"
        )
    for name, sums, total in (("cu_seqlens_q", cu_q, q_total), ("cu_seqlens_k", cu_k, k_total)):
        if not sums or sums[0] != 0 or sums[-1] > total or any(b < a for a, b in itertools.pairwise(sums)):
            raise ValueError(
                f"{name}: got {list(sums)}, expected running sums of lengths, from 0 to at most {total} tokens"
            )
    runs = []
    for (a, b), (c, d) in zip(itertools.pairwise(cu_q), itertools.pairwise(cu_k), strict=True):
        offset = (d - c) - (b - a)
        if causal and offset < 0:  # queries before the first key see nothing
            a, offset = a - offset, 0
        if b > a and d > c:
            runs.append(Segment(0, a, b - a, c, d - c, offset))
    documents = torch.zeros(1, k_total, dtype=torch.int32)  # not read: the runs say it
    return Runs(1, q_total, k_total, causal, 0, window, k_segments=documents, runs=tuple(runs))
