"""Sequences of different lengths as runs of queries and keys, each aligned at its own end."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from .structure import MaskStructure, Segment


@dataclass(eq=False)
class Runs(MaskStructure):
    """A structure that is made of runs from the start, where one offset for all would not say it.

    `causal` and `window` hold within each run; a query of no run sees nothing.
    """

    one_offset: ClassVar[bool] = False
    plain: ClassVar[bool] = False
    runs: tuple[Segment, ...] = ()
    firsts: tuple[int, ...] = ()
    """The place of each run's first query in its sequence, of which a cache may have dropped the first tokens."""

    @classmethod
    def of(cls, runs: Sequence[Segment], batch: int, q_len: int, kv_len: int, causal: bool, window: int | None) -> Self:
        """The structure of some runs in a call of these extents."""
        documents = torch.zeros(1, kv_len, dtype=torch.int32, device="cpu")  # not read: the runs say it
        firsts = tuple(run.offset for run in runs)
        return cls(batch, q_len, kv_len, causal, 0, window, k_segments=documents, runs=tuple(runs), firsts=firsts)

    @property
    def query_positions(self) -> tuple[int, int]:
        """The first place in its sequence at which a query stands, and the one after the last."""
        lasts = [first + run.q_len for first, run in zip(self.firsts, self.runs, strict=True)]
        return min(self.firsts, default=0), max(lasts, default=0)

    @property
    def longest(self) -> int:
        """At most so many tokens have the sequences."""
        return self.query_positions[1]

    def segments(self) -> tuple[Segment, ...]:
        """The runs."""
        return self.runs

    def with_changes(self, **changes: Any) -> MaskStructure:
        """A copy with other rules and nothing remembered; beside a mask the runs become part of it."""
        mask: Tensor | None = changes.pop("mask", None)
        changed = super().with_changes(**changes)
        if mask is None:
            return changed
        return MaskStructure(
            changed.batch, changed.q_len, changed.kv_len, mask=changed.visible(device=mask.device) & mask
        )

    def positions(self, device: torch.device | str) -> Tensor:
        """`[batch, q_len]`: how many tokens of its sequence stand before each query."""
        positions = torch.zeros(self.batch, self.q_len, dtype=torch.long, device="cpu")
        for first, run in zip(self.firsts, self.runs, strict=True):
            places = torch.arange(first, first + run.q_len, device="cpu")
            positions[run.row, run.q_start : run.q_start + run.q_len] = places
        return positions.to(device)

    def visible(
        self, start: int = 0, stop: int | None = None, *, rows: Tensor | None = None, device: torch.device | str = "cpu"
    ) -> Tensor:
        """Boolean `[batch, 1, rows, kv_len]`: what the same rules say within each run."""
        keep = torch.zeros(self.batch, 1, self.q_len, self.kv_len, dtype=torch.bool, device=device)
        for run in self.runs:
            alone = MaskStructure(1, run.q_len, run.k_len, self.causal, run.offset, self.window, self.sinks)
            queries, keys = slice(run.q_start, run.q_start + run.q_len), slice(run.k_start, run.k_start + run.k_len)
            keep[run.row, 0, queries, keys] = alone.visible(device=device)[0, 0]
        return keep[:, :, start:stop] if rows is None else keep[:, :, rows.to(device)]


def query_counts(structure: MaskStructure) -> Tensor:
    """`[batch or 1, q_len]`, on the host: how many queries of its sequence come with each; padding does not count."""
    if isinstance(structure, Runs):
        counts = torch.zeros(structure.batch, structure.q_len, dtype=torch.long, device="cpu")
        for run in structure.runs:
            counts[run.row, run.q_start : run.q_start + run.q_len] = run.q_len
        return counts
    numbers, real = torch.zeros(1, structure.q_len, dtype=torch.long, device="cpu"), structure.padding_on_host()
    if structure.k_segments is not None:
        numbers = structure.on_host(structure.k_segments if structure.q_segments is None else structure.q_segments)
    counted = numbers >= 0
    if real is not None:
        positions = torch.arange(structure.q_len, device="cpu") + structure.offset()
        counted = counted & real[:, positions.clamp(0, structure.kv_len - 1)]
    number = torch.nn.functional.pad((numbers.diff() != 0).cumsum(1), (1, 0)).expand(counted.shape)
    return torch.zeros_like(number).scatter_add(1, number, counted.long()).gather(1, number)


def restricted(structure: MaskStructure, chosen: Tensor) -> MaskStructure:
    """The structure in which sequences see nothing whose queries are not `chosen` `[batch or 1, q_len]`."""
    if isinstance(structure, Runs):
        runs = [
            (run, n) for run, n in zip(structure.runs, structure.firsts, strict=True) if chosen[run.row, run.q_start]
        ]
        return structure.with_changes(runs=tuple(run for run, _ in runs), firsts=tuple(n for _, n in runs))
    if structure.k_segments is not None:
        numbers = structure.k_segments if structure.q_segments is None else structure.q_segments
        # no key has a number below 0
        return structure.with_changes(q_segments=torch.where(chosen.to(numbers.device), numbers, ~numbers))
    assert structure.key_padding is not None
    return structure.with_changes(key_padding=structure.key_padding & chosen[:, :1].to(structure.key_padding.device))


def aligned_runs(
    cu_q: Sequence[int], cu_k: Sequence[int], q_total: int, k_total: int, causal: bool
) -> tuple[Segment, ...]:
    """The runs of sequences packed one after the other in one row; the last query of each stands at its last key.

    `cu_q` and `cu_k` are `sequences + 1` running sums; others that do not start with 0, fall, or go beyond the tokens
    are refused. Tokens after the last sequence belong to none. Causal queries before the first key of a sequence see
    nothing, and are left out.
    """
    if len(cu_q) != len(cu_k):
        raise ValueError(f"cu_seqlens_k: got {len(cu_k)} entries, expected as many as cu_seqlens_q has, {len(cu_q)}")
    for name, sums, total in (("cu_seqlens_q", cu_q, q_total), ("cu_seqlens_k", cu_k, k_total)):
        if not sums or sums[0] != 0 or sums[-1] > total or any(b < a for a, b in itertools.pairwise(sums)):
            raise ValueError(
                f"{name}: got {list(sums)}, expected running sums of lengths, from 0 to at most {total} tokens"
            )
    runs = []
    for (a, b), (c, d) in zip(itertools.pairwise(cu_q), itertools.pairwise(cu_k), strict=True):
        offset = (d - c) - (b - a)
        if causal and offset < 0:
            a, offset = a - offset, 0
        if b > a and d > c:
            runs.append(Segment(0, a, b - a, c, d - c, offset))
    return tuple(runs)
