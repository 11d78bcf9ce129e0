"""One query per sequence: grouped heads become query rows, and only valid keys are read."""

from __future__ import annotations

import torch
from torch import Tensor

from ...request import AttentionRequest
from ...structure import CallStructure
from .bands import dense_part
from .parts import Part

__all__ = ["attend_few"]

# Share of the keys between the first and the last valid one that may be padding before rows are walked one by one.
_WASTE = 0.25


def attend_few(request: AttentionRequest, structure: CallStructure) -> Tensor | None:
    """`[batch, 1, heads, head_dim]` for one query per row, or None where the structure is not made of runs."""
    query, key, value = request.query, request.key, request.value
    batch, heads, _, dim = query.shape
    if value.shape[3] != dim or batch != structure.batch or key.shape[0] != batch:
        return None
    spans = _ranges(structure)
    if spans is None:
        return None
    kv_heads = key.shape[1]
    folded = query.reshape(batch, kv_heads, heads // kv_heads, dim)
    doubled = heads == kv_heads and query.dtype != torch.float32
    if doubled:
        # half-precision products with a single row miss the fast kernel; a repeated row does not
        folded = folded.expand(batch, kv_heads, 2, dim)
    low, high = min(a for a, _ in spans), max(b for _, b in spans)
    if key.stride(3) != 1 or value.stride(3) != 1:
        return None
    total = sum(b - a for a, b in spans)
    call = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    if total == batch * (high - low):
        out = call(folded, key[:, :, low:high], value[:, :, low:high], scale=request.scaling)[0]
    elif total > (1 - _WASTE) * batch * (high - low) or high - low < 128:
        mask = _mask(structure, low, high, query)
        out = call(folded, key[:, :, low:high], value[:, :, low:high], attn_mask=mask, scale=request.scaling)[0]
    else:
        out = query.new_zeros((batch, kv_heads, folded.shape[2], dim))
        for row, (a, b) in enumerate(spans):
            if b > a:
                one = slice(row, row + 1)
                out[one] = call(folded[one], key[one, :, a:b], value[one, :, a:b], scale=request.scaling)[0]
    if doubled:
        out = out[:, :, :1]
    return out.reshape(batch, 1, heads, dim)


def _ranges(structure: CallStructure) -> list[tuple[int, int]] | None:
    """Per batch row the keys that its query sees, or None where they are not one range."""
    if "ranges" not in structure._memo:
        structure._memo["ranges"] = _find_ranges(structure)
    found: list[tuple[int, int]] | None = structure._memo["ranges"]
    return found


def _find_ranges(structure: CallStructure) -> list[tuple[int, int]] | None:
    if structure.windowed and structure.sinks:
        return None
    if structure.plain:
        runs = [(row, 0, structure.kv_len, structure.offset()) for row in range(structure.batch)]
    else:
        segments = structure.segments()
        if segments is None:
            return None
        runs = [(s.row, s.k_start, s.k_len, s.offset) for s in segments]
    spans = [(0, 0)] * structure.batch
    for row, start, length, place in runs:
        low, high = 0, length
        if structure.causal:
            high = min(high, place + 1)
        if structure.window is not None:
            low = max(low, place - structure.window + 1)
            if not structure.causal:
                high = min(high, place + structure.window)
        if high > low:
            spans[row] = (start + low, start + high)
    seen = [span for span in spans if span[1] > span[0]]
    if not seen:
        return None
    # a row that sees nothing is zero: it takes part as an empty range at a place inside
    return [span if span[1] > span[0] else (seen[0][0], seen[0][0]) for span in spans]


def _mask(structure: CallStructure, low: int, high: int, query: Tensor) -> Tensor:
    """Additive `[batch, 1, 1, high - low]`; made once per forward pass."""
    key = ("decode", query.dtype)
    if key not in structure._memo:
        part = Part(0, structure.batch, 0, 1, low, high - low)
        made = dense_part(part, structure, query.device, query.dtype).mask
        if made is None:
            raise RuntimeError("ranges of different lengths hide no key")
        structure._memo[key] = made
    mask: Tensor = structure._memo[key]
    return mask
