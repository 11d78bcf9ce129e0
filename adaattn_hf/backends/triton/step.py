"""The launch of one query per sequence: how its keys are shared out, and where padding and offsets are read."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ...attention.request import AttentionRequest, AttentionResult, head_dim_of
from ...attention.stored import StoredKV
from ...attention.structure import CallStructure
from ..windows import head_windows
from .decode import decode
from .sizes import padded, scale_of
from .tables import shares_of

__all__ = ["attend_step"]

# Programs per multiprocessor that a step is shared out among, more over codes, which take less of its shared memory,
# and the fewest keys that one of them reads.
_WAVES = 2
_WAVES_OVER_CODES = 3
_LEAST_KEYS = 256


def attend_step(request: AttentionRequest) -> AttentionResult:
    """Attention of one query per sequence in one launch, without a look at the data and without a copy of the cache.

    Raises:
        ValueError: The structure is not made of segments.
    """
    query, key, value, structure = request.query, request.key, request.value, request.structure
    batch, heads, _, dim = query.shape
    kv_heads, kv_len, value_dim = key.shape[1], key.shape[2], head_dim_of(value)
    stored = request.stored
    windows = head_windows(structure, request.per_head, kv_heads)
    rows, real, covered, sequences = _rows(structure, query.device)
    make = torch.empty if covered else torch.zeros
    out = make((batch, 1, heads, value_dim), dtype=query.dtype, device=query.device)
    lse = None
    if request.need_lse:
        lse = torch.full((batch, heads, 1), float("-inf"), dtype=torch.float32, device=query.device)
        if request.sink_logits is not None:
            lse = request.sink_logits.float()[None, :, None].repeat(batch, 1, 1)
    if not sequences:
        return AttentionResult(out, lse)
    groups = heads // kv_heads
    block, warps, stages = step_tile(max(dim, value_dim) * query.dtype.itemsize)
    programs = (_WAVES if stored is None else _WAVES_OVER_CODES) * _processors(query.device)
    entries, most = shares_of(
        windows, kv_heads, kv_len, sequences, programs, max(block, _LEAST_KEYS), query.device
    )
    part, done = _scratch(sequences, heads, kv_heads, most, value_dim, query.device)
    offset = structure.q_offset
    sink = request.sink_logits
    member_heads = 1 << (groups - 1).bit_length()
    value_pad = padded(value_dim)
    decode[(entries.shape[0], sequences)](
        query, key, value, out, lse if lse is not None else out, sink if sink is not None else out, part, done,
        rows if rows is not None else done, offset if isinstance(offset, Tensor) else done,
        real if real is not None else done, entries,
        *(_codes(stored, query) if stored is not None else (done, done, done, done)),
        query.stride(0), query.stride(1), query.stride(3), *key.stride(), *value.stride(),
        out.stride(0), out.stride(2), out.stride(3), *(lse.stride()[:2] if lse is not None else (0, 0)),
        *(real.stride() if real is not None else (0, 0)),
        *((*stored.key_scale.stride(), *stored.value_scale.stride()) if stored is not None else (0,) * 6),
        kv_len, offset if isinstance(offset, int) else 0, kv_heads, most,
        scale_of(request.scaling, request.softcap), request.softcap or 0.0,
        GROUPS=groups, ROWS=max(16, member_heads), DIM=dim, DIM_V=value_dim, PAD=padded(dim),
        PAD_V=value_pad, CAUSAL=structure.causal, WINDOW=windows is not None, HAS_CAP=request.softcap is not None,
        HAS_SINK=sink is not None, HAS_LSE=lse is not None, TABLE=rows is not None,
        HAS_OFFSET=rows is None and isinstance(offset, Tensor), HAS_REAL=real is not None, BLOCK_N=block,
        HEADS=member_heads, CHUNK=max(1, min(16, 8192 // (member_heads * value_pad))),
        BITS=0 if stored is None else 4 if value.dtype is torch.uint8 else 8,
        HAS_MEAN=stored is not None and stored.key_mean is not None,
        HAS_FIRST=stored is not None and stored.first_key is not None,
        TURN=dim & -dim if stored is not None and stored.rotated else 0,
        TURN_V=value_dim & -value_dim if stored is not None and stored.rotated else 0,
        COLUMNS=max(1, 8192 // (max(16, member_heads) * value_pad)),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return AttentionResult(out, lse)


def _codes(stored: StoredKV, query: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scales, the mean and the first key of a cache of codes."""
    mean = query if stored.key_mean is None else stored.key_mean
    return stored.key_scale, stored.value_scale, mean, query if stored.first_key is None else stored.first_key


def step_tile(width: int) -> tuple[int, int, int]:
    """Keys of a tile, warps and pipeline stages for keys of so many bytes; the stages stay in shared memory."""
    return (64, 4, 3) if width <= 256 else (32, 4, 3)


@functools.cache
def _processors(device: torch.device) -> int:
    """Multiprocessors of a device; off CUDA, where kernels are interpreted, a few."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _scratch(
    sequences: int, heads: int, kv_heads: int, most: int, value_dim: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Products with maxima and sums behind them, and counters of the shares that are done."""
    if most == 1:
        unused = torch.empty(1, dtype=torch.float32, device=device)
        return unused, unused
    shares = sequences * heads * most
    part = torch.empty(shares * (value_dim + 2), dtype=torch.float32, device=device)
    done = torch.zeros(sequences * kv_heads, dtype=torch.int32, device=device)
    return part, done


def _rows(structure: CallStructure, device: torch.device) -> tuple[Tensor | None, Tensor | None, bool, int]:
    """Sequences `[n, 4]` or None for whole batch rows, which keys are real, whether all rows are covered, how many."""
    if structure.kind == "irregular":
        raise ValueError("structure: a dense mask, expected runs; use the sdpa backend")
    if structure.one_run_a_row and (structure.window is None or structure.sinks_at_runs):
        if structure.key_padding is None:
            return None, None, True, structure.batch
        padding = structure.key_padding
        rows, real = structure.cached(
            ("triton rows", device), lambda: _rows_of_padding(structure, padding.to(device))
        )
        return rows, real, True, structure.batch
    segments = structure.segments()
    if segments is None:
        raise ValueError("structure: sinks beside chunks, expected runs; use the sdpa backend")
    rows = structure.cached(
        ("triton rows", device),
        lambda: (
            torch.tensor([(s.row, s.k_start, s.k_len, s.offset) for s in segments], dtype=torch.int64)
            .view(-1, 4)
            .to(device, non_blocking=True)
        ),
    )
    return rows, None, len(segments) == structure.batch, len(segments)


def _rows_of_padding(structure: CallStructure, real: Tensor) -> tuple[Tensor, Tensor]:
    """First real key, keys up to the last real one, and the offset of each batch row, made where the padding is."""
    batch, kv_len = real.shape
    start = real.int().argmax(1)
    stop = kv_len - real.flip(1).int().argmax(1)
    seen = real.any(1)
    at = torch.zeros_like(start) + structure.q_offset
    if structure.pads_queries:
        seen = seen & real.gather(1, at.clamp(0, kv_len - 1)[:, None])[:, 0]
    count = torch.where(seen, stop - start, 0)
    return torch.stack([torch.arange(batch, device=real.device), start, count, at - start], dim=1), real
