"""Translates positions of a sequence, and what a call sees of them, to the slots of a ring (`groups.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from adaattn_hf.attention.structure import CallStructure

Span = tuple[int, int]
"""Window and sinks of a key/value head: it reads the last `window` tokens and the first `sinks`."""


def slots_after(total: int, window: int, sinks: int, device: torch.device | str) -> Tensor:
    """Position of the token in each slot after `total` tokens."""
    slots = torch.arange(min(total, sinks + window), device=device)
    return torch.where(
        slots < sinks, slots, slots + (total - 1 - slots).div(window, rounding_mode="floor") * window
    )


def slots_in_order(past: int, window: int, sinks: int, device: torch.device | str) -> Tensor:
    """Slots of the sinks and of the ring from its oldest token on, after `past` tokens."""
    oldest = max(sinks, past - window)
    ring = torch.arange(oldest, max(oldest, past), device=device)
    return torch.cat([torch.arange(min(past, sinks), device=device), sinks + (ring - sinks) % window])


def starts_of(structure: CallStructure) -> tuple[int, ...]:
    """Position of the first real token of each row, `kv_len` where there is none yet."""
    return structure.derived(_find_starts)


def _find_starts(structure: CallStructure) -> tuple[int, ...]:
    real = structure.padding_on_host()
    if real is None:
        return (0,) * structure.batch
    first = torch.where(real.any(1), real.int().argmax(1), structure.kv_len)
    return tuple(first.expand(structure.batch).tolist())


def structure_of(structure: CallStructure, span: Span) -> CallStructure:
    """What a call sees of the keys that `HeadGroup.append` hands to it: those of a full cache in the window.

    Args:
        structure: Of the call over a full cache: causal, perhaps with padding.
        span: Of the heads.
    """
    return structure.derived(_find_structure, *span)


def _find_structure(structure: CallStructure, window: int, sinks: int) -> CallStructure:
    batch, count, total = structure.batch, structure.q_len, structure.kv_len
    past = total - count
    if total <= sinks + window:
        return structure.with_changes(window=window, sinks=sinks) if count > 1 else structure
    line = torch.arange(min(past, sinks) + min(max(past - sinks, 0), window) + count, device="cpu")
    held = slots_after(total, window, sinks, "cpu") if count == 1 else line
    plain = CallStructure(batch, count, len(held), causal=True, q_offset=len(held) - count)
    if count > 1:
        plain = plain.with_changes(window=window, sinks=sinks)
    real = structure.padding_on_host()
    if real is None or structure.key_padding is None:
        return plain
    start = torch.tensor(starts_of(structure), dtype=torch.int64, device="cpu")[:, None]
    oldest = total - window if count == 1 else max(sinks, past - window)
    if count > 1:
        held = torch.where(line < sinks, line, line + oldest - sinks)
    at = held[None].expand(batch, -1)
    if sinks:
        sink = start + (held - start) % sinks
        at = torch.where(held < sinks, torch.where(sink < oldest, sink, -1), at)
    rows = torch.arange(past, total, device="cpu")[None, :, None]
    there = (at >= 0) & real.expand(batch, -1).gather(1, at.clamp(0, total - 1))
    if bool(there.all()):
        return plain
    near = (at[:, None] > rows - window) | (at - start < sinks)[:, None]
    seen = there[:, None] & (at[:, None] <= rows) & near
    return CallStructure(batch, count, len(held), mask=seen[:, None].to(structure.key_padding.device))
