"""One query per sequence: grouped heads become query rows, and only valid keys are read."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...attention.request import AttentionRequest
from ...attention.structure import CallStructure
from . import limits
from .kernels import FlashCpuKernel, Rectangle
from .tiles import Part, dense_part


def attend_few(request: AttentionRequest, structure: CallStructure) -> Tensor | None:
    """`[batch, 1, heads, head_dim]` for one query per row; None where its keys are no range, or there are none."""
    query, key, value = request.query, request.key, request.value
    batch, heads, _, dim = query.shape
    kv_heads, kv_len = key.shape[1], key.shape[2]
    if structure.plain and not structure.windowed:
        stop = min(kv_len, structure.offset() + 1) if structure.causal else kv_len
        if stop < 1:
            return None
        if stop < kv_len:
            key, value = key[:, :, :stop], value[:, :, :stop]
        if query.dtype == torch.float32 and batch * kv_heads * stop * 2 * dim * 4 > limits.FOLD_BYTES:
            out = F.scaled_dot_product_attention(
                query, key, value, scale=request.scaling, enable_gqa=heads != kv_heads
            )
            return out.transpose(1, 2)
        spans = [(0, stop)] * batch
    else:
        found = _ranges(structure)
        if found is None:
            return None
        spans = found
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return None
    if value.shape[3] != dim:
        return None
    if not query.stride(3) == key.stride(3) == value.stride(3) == 1:
        return None  # the kernels read the last dimension as contiguous memory, and so do folded queries
    half = query.dtype in (torch.bfloat16, torch.float16)
    alike = all(span == spans[0] for span in spans)
    if half and heads == kv_heads and alike and _flat(key, value) and spans[0][1] > limits.FEW_KEYS_HALF:
        products = _two_products(request, key, value, spans[0])
        if products is not None:
            return products
    folded = query.reshape(batch, kv_heads, heads // kv_heads, dim)
    doubled = heads == kv_heads and half
    if doubled:
        # half-precision products with a single row miss the fast kernel; a repeated row does not
        folded = folded.expand(batch, kv_heads, 2, dim)
    out = _folded(request, structure, folded, key, value, spans)
    if doubled:
        out = out[:, :, :1]
    return out.reshape(batch, 1, heads, dim)


def _flat(key: Tensor, value: Tensor) -> bool:
    """Batch and heads of the valid keys are one dimension without copying."""
    return key.shape[0] == 1 or all(t.stride(0) == t.shape[1] * t.stride(1) for t in (key, value))


def _two_products(
    request: AttentionRequest, key: Tensor, value: Tensor, span: tuple[int, int]
) -> Tensor | None:
    """`[batch, 1, heads, head_dim]` of half-precision heads that share no keys, faster than the fused kernel.

    A product returns half precision, too coarse for scores. What the rounding took away is the difference of a second
    product, which accumulates from the first one; together they have twice the digits. None where the first one is
    larger than half precision can say.
    """
    batch, heads, _, dim = request.query.shape
    query = request.query.reshape(batch * heads, 1, dim)
    own = slice(*span)
    keys, values = (t[:, :, own].flatten(0, 1) for t in (key, value))
    coarse = torch.bmm(query, keys.transpose(1, 2))
    if not bool(coarse.isfinite().all()):
        return None
    rest = torch.baddbmm(coarse, query, keys.transpose(1, 2), beta=-1)
    weights = torch.softmax(torch.add(coarse.float(), rest).mul_(request.scaling), dim=2)
    return torch.bmm(weights.to(values.dtype), values).view(batch, 1, heads, dim)


def _folded(
    request: AttentionRequest,
    structure: CallStructure,
    folded: Tensor,
    key: Tensor,
    value: Tensor,
    spans: list[tuple[int, int]],
) -> Tensor:
    """`[batch, num_kv_heads, rows, head_dim]`: one call, one masked call, or one call per batch row."""
    kernel = FlashCpuKernel()
    low, high = min(a for a, _ in spans), max(b for _, b in spans)
    total, most = sum(b - a for a, b in spans), len(spans) * (high - low)
    if total < (1 - limits.PADDING_SHARE) * most and high - low >= limits.SHORT_KEYS:
        out = folded.new_zeros(folded.shape)
        for row, (a, b) in enumerate(spans):
            if b > a:
                one = slice(row, row + 1)
                own = key[one, :, a:b], value[one, :, a:b]
                out[one] = kernel.forward(Rectangle(folded[one], *own, None, False, request.scaling))[0]
        return out
    mask = None if total == most else _mask(structure, low, high, folded)
    seen = slice(low, high)
    whole = Rectangle(folded, key[:, :, seen], value[:, :, seen], mask, False, request.scaling)
    return kernel.forward(whole)[0]


def _ranges(structure: CallStructure) -> list[tuple[int, int]] | None:
    """Per batch row the keys that its query sees, or None where they are not one range."""
    return structure.cached("ranges", lambda: _find_ranges(structure))


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
        if structure.window is not None and structure.windowed:  # else its sinks are all that it would hide
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

    def make() -> Tensor:
        part = Part(0, structure.batch, 0, 1, low, high - low)
        mask = dense_part(part, structure, query.device, query.dtype).mask
        assert mask is not None  # ranges of different lengths hide keys
        return mask

    return structure.cached(("decode", query.dtype), make)
