"""Plans the kernel calls of a structure: which parts, in which order, or one masked call where that costs less."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...attention.structure import CallStructure, Segment
from . import limits
from .tiles import (
    Local,
    Part,
    Program,
    Rules,
    Run,
    band_mask,
    dense_program,
    empty_rows,
    local_parts,
    may_be_empty,
)  # fmt: skip


class Target(NamedTuple):
    """What a program is made for.

    Attributes:
        device, dtype: Of the masks.
        merges, flag, step: See `Rules`.
        repeats: Equal parts may be one call over overlapping views.
        band: Rows of a band of a structure that is not made of runs.
        work: Operations per visible pair of a query and a key, all heads.
        rate: Operations per second that the kernel reaches here.
        call: Seconds that one more call costs.
        lse: The log-sum-exp will be looked at.
    """

    device: torch.device
    dtype: torch.dtype
    merges: bool
    flag: bool
    step: int
    repeats: bool
    band: int
    work: int
    rate: float
    call: float
    lse: bool


def program_for(structure: CallStructure, target: Target) -> Program:
    """The program of a structure; made once and kept with it."""
    return structure.cached(("program", target), lambda: _program(structure, target))


def _program(structure: CallStructure, target: Target) -> Program:
    window = structure.window
    rules = Rules(
        structure.causal,
        window,
        structure.sinks if window is not None else 0,
        target.merges,
        target.flag,
        target.step,
    )
    if structure.plain:
        # with causality, queries before the first key see nothing and take no part
        before = max(0, -structure.offset()) if structure.causal else 0
        whole = Segment(
            0, before, max(0, structure.q_len - before), 0, structure.kv_len, structure.offset() + before
        )
        groups = [(structure.batch, [(whole, 1)])]
    else:
        pairs = structure.batch * structure.q_len * structure.kv_len
        if pairs <= limits.SMALL_PAIRS and target.device.type == "cpu":
            return dense_program(structure, target.device, target.dtype, structure.q_len, target.lse)
        segments = structure.segments()
        if segments is None:
            return dense_program(structure, target.device, target.dtype, target.band)
        groups = list(_grouped(segments, rules))
    masks = _Masks(rules, target)
    parts: list[Part] = []
    covered = 0
    for rows, runs in groups:
        for segment, count in runs:
            run = Run(segment.q_len, segment.k_len, segment.offset)
            for local in local_parts(run, rules):
                if not local.k_len:
                    continue  # queries before the first key; torch's kernels divide by the number of keys
                if not local.merge:
                    covered += rows * local.q_len * local.count * count
                parts.extend(_placed(local, run, segment, rows, count, target, masks))
    program = Program(tuple(parts), covered == structure.batch * structure.q_len, any(p.merge for p in parts))
    if not structure.plain and _masked_is_cheaper(structure, program, target):
        return dense_program(structure, target.device, target.dtype, structure.q_len)
    return program


def _grouped(segments: tuple[Segment, ...], rules: Rules) -> Iterator[tuple[int, list[tuple[Segment, int]]]]:
    """Neighbouring batch rows with the same runs as one group; in it, equal runs side by side as one with a count."""
    by_row: dict[int, list[Segment]] = {}
    for segment in segments:
        by_row.setdefault(segment.row, []).append(segment)
    rows = list(by_row.items())
    index = 0
    while index < len(rows):
        first, own = rows[index]
        shape = [segment[1:] for segment in own]
        count = 1
        while index + count < len(rows) and rows[index + count][0] == first + count:
            if [segment[1:] for segment in rows[index + count][1]] != shape:
                break
            count += 1
        yield count, _repeated(own, rules) if count == 1 else [(segment, 1) for segment in own]
        index += count


def _repeated(segments: list[Segment], rules: Rules) -> list[tuple[Segment, int]]:
    found: list[tuple[Segment, int]] = []
    for segment in segments:
        if found:
            last, count = found[-1]
            length = last.q_len
            alike = (
                segment[2] == length and segment[4:] == last[4:] and (last.k_len, last.offset) == (length, 0)
            )
            beside = (segment.q_start, segment.k_start) == (
                last.q_start + count * length,
                last.k_start + count * length,
            )
            if alike and beside and (rules.window is None or rules.window >= length):
                found[-1] = (last, count + 1)
                continue
        found.append((segment, 1))
    return found


def _placed(
    local: Local, run: Run, segment: Segment, rows: int, count: int, target: Target, masks: _Masks
) -> Iterator[Part]:
    """Parts of the call from one part of a run; repeated ones stay one where the kernel can take them so."""
    part = local.placed(segment.row, rows, segment.q_start, segment.k_start)
    if local.band:
        mask, empty = masks.get(local, run)
        part = part._replace(mask=mask, empty=empty)
    repeats = max(local.count, count)
    if repeats == 1:
        yield part
        return
    step = local.q_len if local.count > 1 else run.q_len
    if target.repeats and step == local.q_len:
        for row in range(segment.row, segment.row + rows):
            yield part._replace(row=row, rows=1, count=repeats)
        return
    for index in range(repeats):
        yield part._replace(
            count=1,
            q_start=part.q_start + index * step,
            k_start=part.k_start + index * step,
            sink_start=part.sink_start + (index * step if count > 1 else 0),
        )


class _Masks:
    """Additive masks of bands, each made once."""

    def __init__(self, rules: Rules, target: Target) -> None:
        self.rules, self.target = rules, target
        self.known: dict[tuple[int, ...], tuple[Tensor | None, Tensor | None]] = {}

    def get(self, local: Local, run: Run) -> tuple[Tensor | None, Tensor | None]:
        """Mask of a band and the rows that it leaves empty."""
        rules, first = self.rules, local.q_start + run.offset
        # bands behind the sinks are alike wherever they stand
        inside = rules.sinks if local.k_start < rules.sinks else 0
        key = (first - local.k_start, local.q_len, local.k_len, local.sinks, inside and local.k_start + 1)
        if key not in self.known:
            place = (first, local.q_len, local.k_start, local.k_len)
            keep = band_mask(
                *place, causal=rules.causal, window=rules.window, sinks=inside, sink_columns=local.sinks
            )
            bare = not local.sinks and may_be_empty(*place, causal=rules.causal, window=rules.window)
            self.known[key] = (None, None) if keep is None else _on_device(keep, self.target, bare)
        return self.known[key]


def _on_device(keep: Tensor, target: Target, some_empty: bool) -> tuple[Tensor, Tensor | None]:
    """A boolean mask as an additive one on the target's device, and the rows in which it hides every key."""
    numbers = torch.zeros(keep.shape, dtype=target.dtype, device="cpu").masked_fill_(~keep, float("-inf"))
    numbers = numbers.to(target.device, non_blocking=True)[None, None]
    return numbers, empty_rows(numbers) if some_empty else None


def _masked_is_cheaper(structure: CallStructure, program: Program, target: Target) -> bool:
    """Whether one masked call over everything beats the calls of a program: many short sequences."""
    pairs = structure.batch * structure.q_len * structure.kv_len
    most = limits.MASKED_PAIRS if target.device.type == "cpu" else limits.MASKED_PAIRS_CUDA
    if len(program.parts) <= 1 or pairs > most:
        return False
    own = sum(p.rows * p.count * p.q_len * p.k_len * (0.5 if p.causal else 1.0) for p in program.parts)
    return (pairs - own) * target.work / target.rate < (len(program.parts) - 1) * target.call
