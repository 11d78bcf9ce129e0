"""One query per sequence on a processor: grouped heads become query rows, and only valid keys are read."""

from __future__ import annotations

import torch
from torch import Tensor

from ...attention.call import AttentionCall
from ...attention.structure import MaskStructure
from .kernels import operator, wants_gradient
from .masked import additive_mask

# Sizes from which another way of calling torch's operator is faster, measured on two AVX-512 cores.
SHORT_KEYS = 128
"""Keys up to which one query is served by the plain operator, which is quicker than anything around it."""
FOLD_BYTES = 100_000_000
"""Bytes of fp32 keys and values beyond which reading them is all that counts, folded heads or not."""
FEW_KEYS_HALF = 384
"""Half-precision keys up to which one query of ungrouped heads stays with the fused kernel."""
PADDING_SHARE = 0.25
"""Share of padding among the keys of a decode step from which batch rows are walked one by one."""


def attend_few(call: AttentionCall) -> Tensor | None:
    """`[batch, 1, heads, head_dim]` for one query per row; None where its keys are no range, or there are none.

    The structure is settled.
    """
    query, key, value, structure = call.query, call.key, call.value, call.structure
    scaling = call.scaling
    batch, heads, _, dim = query.shape
    kv_heads = key.shape[1]
    ranges = structure.cached(_ranges)
    if ranges is None or value.shape[3] != dim or wants_gradient(query, key, value):
        return None
    if not query.stride(3) == key.stride(3) == value.stride(3) == 1:
        return None  # the kernels read the last dimension as contiguous memory, and so do folded queries
    low, high = min(a for a, _ in ranges), max(b for _, b in ranges)
    bytes_read = 2 * batch * kv_heads * (high - low) * dim * key.dtype.itemsize
    if query.dtype == torch.float32 and structure.plain and bytes_read > FOLD_BYTES:
        return operator(query, key[:, :, low:high], value[:, :, low:high], scaling).transpose(1, 2)
    lone = heads == kv_heads and query.dtype.itemsize == 2
    alike = all(keys == ranges[0] for keys in ranges)
    flat = batch == 1 or all(t.stride(0) == t.shape[1] * t.stride(1) for t in (key, value))
    if lone and alike and flat and high > FEW_KEYS_HALF:
        products = _two_products(query, key[:, :, low:high], value[:, :, low:high], scaling)
        if products is not None:
            return products
    folded = query.reshape(batch, kv_heads, heads // kv_heads, dim)
    if lone:
        # half-precision products with a single row miss the fast kernel; a repeated row does not
        folded = folded.expand(batch, kv_heads, 2, dim)
    total, most = sum(b - a for a, b in ranges), batch * (high - low)
    if total < (1 - PADDING_SHARE) * most and high - low >= SHORT_KEYS:
        out = folded.new_zeros(folded.shape)
        for row, (a, b) in enumerate(ranges):
            if b > a:
                at = slice(row, row + 1)
                out[at] = operator(folded[at], key[at, :, a:b], value[at, :, a:b], scaling)
    else:
        mask = None if total == most else structure.cached(additive_mask, query.dtype, query.device, low, high)
        out = operator(folded, key[:, :, low:high], value[:, :, low:high], scaling, mask)
    return (out[:, :, :1] if lone else out).reshape(batch, 1, heads, dim)


def _two_products(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor | None:
    """`[batch, 1, heads, head_dim]` of half-precision heads that share no keys, faster than the fused kernel.

    A product returns half precision, too coarse for scores. What the rounding took away is the difference of a second
    product, which accumulates from the first one; together they have twice the digits. None where the first one is
    larger than half precision can say.
    """
    batch, heads, _, dim = query.shape
    query, key, value = query.reshape(batch * heads, 1, dim), key.flatten(0, 1), value.flatten(0, 1)
    coarse = torch.bmm(query, key.transpose(1, 2))
    if not bool(coarse.isfinite().all()):
        return None
    rest = torch.baddbmm(coarse, query, key.transpose(1, 2), beta=-1)
    weights = torch.softmax(torch.add(coarse.float(), rest).mul_(scaling), dim=2)
    return torch.bmm(weights.to(value.dtype), value).view(batch, 1, heads, dim)


def _ranges(structure: MaskStructure) -> list[tuple[int, int]] | None:
    if structure.windowed and structure.sinks:
        return None
    if structure.plain:
        runs = [(row, 0, structure.kv_len, structure.offset()) for row in range(structure.batch)]
    else:
        segments = structure.segments()
        if segments is None:
            return None
        runs = [(s.row, s.k_start, s.k_len, s.offset) for s in segments]
    ranges = [(0, 0)] * structure.batch
    for row, start, length, place in runs:
        low, high = 0, length
        if structure.causal:
            high = min(high, place + 1)
        if structure.window is not None and structure.windowed:  # else its sinks are all that it would hide
            low = max(low, place - structure.window + 1)
            if not structure.causal:
                high = min(high, place + structure.window)
        if high > low:
            ranges[row] = (start + low, start + high)
    seen = [(a, b) for a, b in ranges if b > a]
    if not seen:
        return None
    # a row that sees nothing is zero: it takes part as an empty range at a place inside
    return [(a, b) if b > a else (seen[0][0], seen[0][0]) for a, b in ranges]
