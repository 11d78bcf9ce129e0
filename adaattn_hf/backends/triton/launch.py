"""From a request to a launch: tables, tile sizes, output."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...request import AttentionRequest, AttentionResult
from ...structure import CallStructure, Segment
from .kernels import decode, forward, merge

__all__ = ["attend"]

# Shares that a decode step is cut into so that a device of about this many multiprocessors is full, with two waves.
_PROGRAMS = 264


def attend(request: AttentionRequest) -> AttentionResult:
    """Attention over the segments of a request.

    Raises:
        ValueError: The structure is not made of segments.
    """
    structure = request.structure
    segments = _segments(structure)
    batch, heads, q_len, _ = request.query.shape
    value_dim = request.value.shape[3]
    shape = (batch, q_len, heads, value_dim)
    covered = sum(s.q_len for s in segments) == batch * q_len
    out = (torch.empty if covered else torch.zeros)(
        shape, dtype=request.query.dtype, device=request.query.device
    )
    lse = None
    if request.need_lse:
        lse = torch.full((batch, heads, q_len), float("-inf"), dtype=torch.float32, device=out.device)
        if request.sink_logits is not None:
            lse = request.sink_logits.float()[None, :, None].repeat(batch, 1, q_len)
    if segments:
        run = _decode if q_len == 1 else _forward
        run(request, segments, out, lse)
    return AttentionResult(out, lse)


def _segments(structure: CallStructure) -> Sequence[Segment]:
    """The runs of the call; a plain call is one per batch row."""
    segments = structure.segments()
    if segments is None:
        raise ValueError("structure: a dense mask or padding with holes, expected runs; use the sdpa backend")
    return segments


def _padded(dim: int) -> int:
    """Tile width for a head size: a power of two, at least 16."""
    return max(16, 1 << (dim - 1).bit_length())


def _ceil(total: int, part: int) -> int:
    """Parts that hold a total."""
    return (total + part - 1) // part


def _tile(pad: int) -> tuple[int, int, int, int]:
    """Query rows, key columns, warps and stages for a head size."""
    if pad <= 64:
        return 128, 64, 4, 3
    if pad <= 128:
        return 128, 64, 8, 3
    return 64, 32, 4, 2


def _table(
    structure: CallStructure, segments: Sequence[Segment], block: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Segments `[n, 6]` and tiles `[m, 2]` (segment, first query), longest first; made once per forward pass."""
    key = ("triton", block, device)
    memo = structure._memo
    if key not in memo:
        tiles = []
        for index, s in enumerate(segments):
            for first in range(0, s.q_len, block):
                last = min(first + block, s.q_len) - 1 + s.offset
                keys = min(s.k_len, last + 1) if structure.causal else s.k_len
                tiles.append((-keys, index, first))
        tiles.sort()
        both = torch.tensor(
            [x for s in segments for x in s] + [x for _, index, first in tiles for x in (index, first)],
            dtype=torch.int32,
        ).to(device, non_blocking=True)
        cut = 6 * len(segments)
        memo[key] = (both[:cut].view(-1, 6), both[cut:].view(-1, 2))
    table: tuple[Tensor, Tensor] = memo[key]
    return table


def _forward(request: AttentionRequest, segments: Sequence[Segment], out: Tensor, lse: Tensor | None) -> None:
    query, key, value, structure = request.query, request.key, request.value, request.structure
    dim, value_dim = query.shape[3], value.shape[3]
    block_m, block_n, warps, stages = _tile(max(_padded(dim), _padded(value_dim)))
    table, tiles = _table(structure, segments, block_m, query.device)
    sink = request.sink_logits
    forward[(query.shape[1], tiles.shape[0])](
        query, key, value, out, lse if lse is not None else out, sink if sink is not None else out, table, tiles,
        *query.stride(), *key.stride(), *value.stride(), *out.stride(),
        *(lse.stride()[:2] if lse is not None else (0, 0)),
        request.scaling, request.softcap or 0.0, structure.window or 0, structure.sinks,
        GROUPS=query.shape[1] // key.shape[1], DIM=dim, DIM_V=value_dim, PAD=_padded(dim), PAD_V=_padded(value_dim),
        CAUSAL=structure.causal, WINDOW=structure.windowed, HAS_CAP=request.softcap is not None,
        HAS_SINK=sink is not None, HAS_LSE=lse is not None, BLOCK_M=block_m, BLOCK_N=block_n,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _decode(request: AttentionRequest, segments: Sequence[Segment], out: Tensor, lse: Tensor | None) -> None:
    """Shares of the keys in parallel, merged by their log-sum-exp."""
    query, key, value, structure = request.query, request.key, request.value, request.structure
    dim, value_dim = query.shape[3], value.shape[3]
    heads, kv_heads = query.shape[1], key.shape[1]
    # three stages of keys and values stay in shared memory
    block_n = 64 if max(dim, value_dim) * query.dtype.itemsize <= 256 else 32
    longest = max(s.k_len for s in segments)
    shares = max(1, min(_PROGRAMS // max(1, len(segments) * kv_heads), _ceil(longest, 4 * block_n)))
    span = _ceil(_ceil(longest, shares), block_n) * block_n
    shares = _ceil(longest, span)
    table, _ = _table(structure, segments, 1, query.device)
    n = len(segments)
    part = torch.empty((n, heads, shares, value_dim), dtype=torch.float32, device=query.device)
    m, total = torch.empty((2, n, heads, shares), dtype=torch.float32, device=query.device)
    decode[(kv_heads, n, shares)](
        query, key, value, part, m, total, table,
        query.stride(0), query.stride(1), query.stride(3), *key.stride(), *value.stride(),
        request.scaling, request.softcap or 0.0, structure.window or 0, structure.sinks, span,
        GROUPS=heads // kv_heads, ROWS=max(16, 1 << (heads // kv_heads - 1).bit_length()), DIM=dim, DIM_V=value_dim,
        PAD=_padded(dim), PAD_V=_padded(value_dim), CAUSAL=structure.causal, WINDOW=structure.windowed,
        HAS_CAP=request.softcap is not None, BLOCK_N=block_n, num_warps=4, num_stages=3,
    )  # fmt: skip
    sink = request.sink_logits
    merge[(heads, n)](
        part, m, total, out, lse if lse is not None else out, sink if sink is not None else out, table,
        out.stride(0), out.stride(2), out.stride(3), *(lse.stride()[:2] if lse is not None else (0, 0)), shares,
        DIM_V=value_dim, PAD_V=_padded(value_dim), HAS_SINK=sink is not None, HAS_LSE=lse is not None, BLOCK=16,
        num_warps=1 if value_dim <= 64 else 2,
    )  # fmt: skip
