"""Calls with a mask, of any structure: whole, or in bands of queries, each against the keys that it may see."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...attention.call import AttentionCall, narrowed
from ...attention.softmax import softmax_parts, weighted
from ...attention.structure import MaskStructure
from ..base import zero_output
from .kernels import additive, operator

# Sizes of bands, measured on two AVX-512 cores.
WINDOW_ROWS = 128
"""Rows of a band under a window; short bands compute fewer hidden pairs."""
BAND_ROWS, LEAST_ROWS = 256, 32
"""Rows of any other band, those of all batch rows together, and the fewest that fill a tile of a kernel."""
SCORES = 1 << 24
"""Scores of all heads that a band holds where torch writes them out: softcaps, learned sinks, gradients of a bias."""
KEPT_BYTES = 1 << 28
"""Bytes of masks that are kept for all layers; beyond, each layer makes them again."""


def additive_mask(structure: MaskStructure, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The additive mask of a structure, `[batch or 1, heads or 1, q_len, kv_len]`, for `MaskStructure.cached`."""
    return additive(structure.visible(device=device), dtype)


def added(bias: Tensor, query: Tensor) -> Tensor:
    """A bias in a dtype in which torch's operator adds it to scores: on processors fp32 beside half precision, too."""
    wide = query.is_cpu and bias.dtype is not query.dtype
    return narrowed(bias, torch.promote_types(query.dtype, torch.float32) if wide else query.dtype)


def masked_call(
    call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kernel: Any = operator
) -> Tensor:
    """One call, `[batch, heads, q_len, head_dim_v]`; a single query takes its group's heads as rows on processors.

    Tokens are some of the call's. The mask is additive or boolean, broadcastable to `[batch, heads, q_len, kv_len]`.
    """
    batch, heads, q_len, _ = query.shape
    groups = heads // key.shape[1]
    if call.softcap is not None or call.sink_logits is not None:
        # A product in float16 overflows at logits that the softmax of it would bear; one in bfloat16 does not, and is
        # what the matrix units of a device compute many times as fast.
        narrow = query.is_cuda and query.dtype == torch.bfloat16 and torch.compiler.is_compiling()
        weights, _, _ = softmax_parts(
            query, key, call.scaling,
            softcap=call.softcap, sinks=call.sink_logits, mask=mask, work=query.dtype if narrow else None,
        )  # fmt: skip
        return weighted(weights, value, call.dropout)
    # a CUDA device shares work out by heads: folded into rows, they would leave most of it idle
    folded = groups > 1 and q_len == 1 and (mask is None or mask.shape[1] == 1) and not query.is_cuda
    if folded:
        query = query.reshape(batch, heads // groups, groups, -1)
    out: Tensor = kernel(query, key, value, call.scaling, mask, dropout=call.dropout)
    return out.reshape(batch, heads, 1, value.shape[3]) if folded else out


class Band(NamedTuple):
    """Neighbouring queries and the keys that they are computed against.

    Attributes:
        start, rows: The queries.
        low, keys: The keys.
        sinks: So many first keys of the call stand in front of the band's own.
        mask: Additive, broadcastable to `[batch, heads, rows, sinks + keys]`; None where all of them are seen.
        count: The band is repeated so many times, each `rows` further in queries and keys.
    """

    start: int
    rows: int
    low: int
    keys: int
    sinks: int
    mask: Tensor | None
    count: int = 1  # type: ignore[assignment]  # hides tuple.count, which nobody needs


def in_bands(call: AttentionCall) -> Tensor:
    """Attention under any settled structure, `[batch, q_len, heads, head_dim_v]`, without a tensor of all scores."""
    query, bias, structure = call.query, call.bias, call.structure
    seen = structure.kv_len if structure.window is None else min(structure.kv_len, structure.window)
    rows = BAND_ROWS // (1 if structure.plain else structure.batch)
    if call.softcap is not None or call.sink_logits is not None or (bias is not None and bias.requires_grad):
        rows = min(rows, SCORES // (query.shape[0] * query.shape[1] * seen))  # no kernel spares them
    rows = max(LEAST_ROWS, rows)
    # masks are made once for all layers, unless that would take too much memory
    heads = 1 if structure.mask is None else structure.mask.shape[1]
    kept = structure.batch * heads * structure.q_len * seen * query.dtype.itemsize <= KEPT_BYTES
    sizes = rows if structure.window is None else min(rows, WINDOW_ROWS), query.dtype, query.device
    bands = structure.cached(_all_bands, *sizes) if kept else _bands(structure, *sizes)
    pieces, nothing_seen = list[Tensor](), True
    for band in bands:
        if not band.sinks + band.keys:
            pieces.append(query.new_zeros(*query.shape[:2], band.rows * band.count, call.value.shape[3]))
            continue
        nothing_seen = False
        if band.count > 1 and bias is None:
            pieces.append(_repeated_band(band, call))
        else:
            for away in range(0, band.count * band.rows, band.rows):
                pieces.append(_one_band(band._replace(start=band.start + away, low=band.low + away), call))
    return zero_output(call).out if nothing_seen else torch.cat(pieces, dim=2).transpose(1, 2)


def _all_bands(structure: MaskStructure, step: int, dtype: torch.dtype, device: torch.device) -> tuple[Band, ...]:
    return tuple(_bands(structure, step, dtype, device))


def _bands(structure: MaskStructure, step: int, dtype: torch.dtype, device: torch.device) -> Iterator[Band]:
    """The bands of a structure; equal neighbours, as those of a window, are one with a count."""
    before: Band | None = None
    place: tuple[int, int, int, int] | None = None
    mask: Tensor | None
    for start in range(0, structure.q_len, step):
        rows = min(step, structure.q_len - start)
        low, high, sinks = _reach(structure, start, rows)
        last, place = place, (rows, high - low, structure.offset() + start - low, sinks)
        if not structure.plain:
            mask = additive(structure.visible(start, start + rows, device=device)[..., low:high], dtype)
        elif before is None or place != last:
            visible = structure.with_changes(
                batch=1, q_len=rows, kv_len=high - low, q_offset=place[2], sinks=0 if sinks else structure.sinks
            ).visible()
            mask = None
            if not bool(visible.all()):
                visible = F.pad(visible, (sinks, 0), value=True).to(device, non_blocking=True)
                mask = additive(visible, dtype)
        elif not sinks:
            before = before._replace(count=before.count + 1)
            continue
        if before is not None:
            yield before
        before = Band(start, rows, low, high - low, sinks, mask)
    if before is not None:
        yield before


def _reach(structure: MaskStructure, start: int, rows: int) -> tuple[int, int, int]:
    """First key that one of some rows may see, the one behind the last, and the number of sinks in front of these."""
    low, high = 0, structure.kv_len
    if structure.spans is not None or not structure.one_offset:  # spans: whatever the other rules say
        return low, high, 0
    first, window = structure.offset() + start, structure.window
    if structure.causal:
        high = min(high, first + rows)
    if window is None or (structure.sinks and not structure.plain):
        return low, max(high, 0), 0
    sinks = min(structure.sinks, structure.kv_len)
    if not structure.causal:
        high = min(high, max(first + rows - 1 + window, sinks))
    low = first - window + 1
    if low <= sinks:
        return 0, max(high, 0), 0
    return min(low, high), high, sinks


def _one_band(band: Band, call: AttentionCall) -> Tensor:
    def among_keys(t: Tensor, dim: int) -> Tensor:
        near = t.narrow(dim, band.low, band.keys)
        return torch.cat([t.narrow(dim, 0, band.sinks), near], dim) if band.sinks else near

    query = call.query.narrow(2, band.start, band.rows)
    mask, bias = band.mask, call.bias
    if bias is not None:
        bias = bias if bias.shape[2] == 1 else bias.narrow(2, band.start, band.rows)
        bias = added(bias if bias.shape[3] == 1 else among_keys(bias, 3), query)
        bias = bias.expand(-1, -1, band.rows, band.sinks + band.keys)
        mask = bias if mask is None else bias + mask
    return masked_call(call, query, among_keys(call.key, 2), among_keys(call.value, 2), mask)


def _repeated_band(band: Band, call: AttentionCall) -> Tensor:
    """One call per batch row, in which the repetitions are the batch: overlapping views of the row's keys."""

    def views(t: Tensor, start: int, length: int) -> Tensor:
        covered = t.narrow(1, start, length + (band.count - 1) * band.rows)
        return covered.unfold(1, length, band.rows).permute(1, 0, 3, 2)

    rows = []
    for query, key, value in zip(call.query, call.key, call.value, strict=True):
        keys, values = views(key, band.low, band.keys), views(value, band.low, band.keys)
        out = masked_call(call, views(query, band.start, band.rows), keys, values, band.mask)
        rows.append(out.transpose(0, 1).flatten(1, 2))
    return torch.stack(rows)
