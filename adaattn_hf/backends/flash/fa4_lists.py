"""Makes, on the device, the lists of key blocks that each block of queries reads in flash-attn 4."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...attention.structure import CallStructure, Segment

BLOCK = 128
"""Queries and keys per block."""


class Runs(NamedTuple):
    """Int32 `[batch, q_len]`: first key of a query's run, the one behind its last, and the query's place among keys.

    A query that sees nothing has a run without keys.
    """

    first: Tensor
    stop: Tensor
    place: Tensor


class Blocks(NamedTuple):
    """Boolean `[batch, kv_heads, blocks of queries, blocks of keys]`: some pair is visible, every pair is."""

    some: Tensor
    every: Tensor


def runs_of(structure: CallStructure, segments: tuple[Segment, ...], device: torch.device) -> Runs:
    """The runs of every query of a call."""
    shape = (structure.batch, structure.q_len)
    first = torch.full(shape, structure.kv_len, dtype=torch.int32, device="cpu")
    stop, place = (
        torch.zeros(shape, dtype=torch.int32, device="cpu"),
        torch.full(shape, -1, dtype=torch.int32, device="cpu"),
    )
    for s in segments:
        rows = slice(s.q_start, s.q_start + s.q_len)
        first[s.row, rows] = s.k_start
        stop[s.row, rows] = s.k_start + s.k_len
        place[s.row, rows] = torch.arange(s.q_len, dtype=torch.int32, device="cpu") + (s.k_start + s.offset)
    return Runs(*torch.stack([first, stop, place]).to(device, non_blocking=True).unbind(0))


def blocks_of(runs: Runs, kv_len: int, causal: bool, windows: Tensor, sinks: Tensor) -> Blocks:
    """The blocks that queries see under the window and sinks of each key/value head (int32 `[kv_heads]`).

    Bounds per block of queries stand for its rows: a block that is said to be seen in part may hold nothing, one that
    is said to be seen whole is.
    """
    firsts, stops, places = (_by_block(t) for t in runs)
    seeing = stops[1] > firsts[0]
    first_low, first_high = firsts[0][:, None, :, None], firsts[1][:, None, :, None]
    stop_low, stop_high = stops[0][:, None, :, None], stops[1][:, None, :, None]
    low, high = places[0][:, None, :, None], places[1][:, None, :, None]
    start = torch.arange(0, kv_len, BLOCK, device=windows.device, dtype=torch.int32)
    end = (start + BLOCK).clamp(max=kv_len) - 1
    window, sink = windows[None, :, None, None], sinks[None, :, None, None]
    some = (end >= first_low) & (start < stop_high)
    every = (start >= first_high) & (end < stop_low) & (start + BLOCK <= kv_len)
    near, all_near = low - end < window, high - start < window
    if causal:
        some, every = some & (start <= high), every & (end <= low)
    else:
        near, all_near = near & (start - high < window), all_near & (end - low < window)
    some = some & (near | (start - first_high < sink)) & seeing[:, None, :, None]
    every = every & (all_near | (end - first_low < sink))
    return Blocks(some, every & some)


def _by_block(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns minimum and maximum of each block of rows; a last, short block is filled with its last row."""
    missing = -rows.shape[1] % BLOCK
    if missing:
        rows = torch.cat([rows, rows[:, -1:].expand(-1, missing)], dim=1)
    blocks = rows.reshape(rows.shape[0], -1, BLOCK)
    return blocks.amin(2), blocks.amax(2)


def lists(blocks: Blocks, groups: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Counts and indices of the blocks that need the mask, then of those that are seen whole, for every query head."""
    return (*_listed(blocks.some & ~blocks.every, groups), *_listed(blocks.every, groups))


def _listed(chosen: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    counts = chosen.sum(3, dtype=torch.int32)
    order = (~chosen).to(torch.uint8).argsort(dim=3, stable=True).int()
    return counts.repeat_interleave(groups, 1), order.repeat_interleave(groups, 1)
