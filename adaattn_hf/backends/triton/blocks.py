"""The launches of attention over kept blocks of keys: pooled keys, choice, lists, attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...attention.heads import HeadRules
from ...attention.request import AttentionRequest, AttentionResult
from ...attention.structure import Segment
from ..windows import ALL, HeadWindows
from .kept import choose, listing, over_lists, pool
from .prefill import blank, bulk_of
from .sizes import padded, scale_of
from .tables import work_of

__all__ = ["attend_blocks"]

_STEPS = 14
_PART = 16384
"""Entries of the mean keys that a program multiplies at a time, for the sake of shared memory."""
_BULK_EDGES = True
"""As in `prefill`."""


def attend_blocks(
    request: AttentionRequest, rules: HeadRules, segments: Sequence[Segment], windows: HeadWindows | None
) -> AttentionResult:
    """Four launches for all heads, whatever each keeps.

    Raises:
        ValueError: More blocks than a row's weights can be held for.
    """
    query, key, value, structure = request.query, request.key, request.value, request.structure
    if request.scaling < 0:
        query = -query
    batch, heads, q_len, dim = query.shape
    kv_heads, value_dim, block = key.shape[1], value.shape[3], rules.block
    groups, pad, value_pad = heads // kv_heads, padded(dim), padded(value_dim)
    out, lse = blank(request, request.need_lse)
    blocks = max((-(-s.k_len // block) for s in segments), default=1)
    width = max(32, 1 << (blocks - 1).bit_length())
    rows, warps = choice_tile(width)
    device, causal = query.device, structure.causal
    masses = _masses(rules, device)
    words = width // 32
    bits = torch.empty((kv_heads, batch, q_len, words), dtype=torch.int32, device=device)
    pooled = torch.empty((2, len(segments), kv_heads, blocks, pad), dtype=key.dtype, device=device)
    by_choice = work_of("queries", structure, segments, None, kv_heads, (rows, block), device)
    pool[(blocks, kv_heads, len(segments))](
        key, pooled, by_choice.segments, *key.stride(), blocks, DIM=dim, PAD=pad, BLOCK=block, num_warps=4
    )
    part = min(pad, max(16, _PART // width))
    # the engine copies at most 256 rows, and at least 64 bytes of each
    means = bulk_of(pooled.view(1, 1, -1, pad), width, part) if width <= 256 and part >= 32 else None
    choose[(by_choice.entries.shape[0],)](
        query, pooled, pooled if means is None else means, bits, by_choice.segments, by_choice.entries, masses,
        *query.stride(), len(segments), kv_heads, blocks, batch, q_len, words, abs(request.scaling),
        request.softcap or 0.0, GROUPS=groups, DIM=dim, PAD=pad, PART=part, BULK=means is not None, CAUSAL=causal,
        HAS_CAP=request.softcap is not None, ROWS=rows, WIDTH=width, BLOCK=block, STEPS=_STEPS,
        num_warps=warps, num_stages=1,
    )  # fmt: skip
    tile, columns = 64, 64 if max(pad, value_pad) <= 128 else 32
    seen = windows or ((ALL, 0),) * kv_heads
    # a head that keeps blocks has its sinks among them
    shown = tuple((ALL, 0) if mass and window == ALL else (window, sinks)
                  for mass, (window, sinks) in zip(rules.masses, seen, strict=True))  # fmt: skip
    windowed = any(window != ALL for window, _ in shown)
    work = work_of(
        "queries", structure, segments, shown if windowed else None, kv_heads, (tile, columns), device
    )
    entries = work.entries.shape[0]
    lists = torch.empty((entries, width), dtype=torch.int32, device=device)
    counts = torch.empty((entries, 2), dtype=torch.int32, device=device)
    listing[(entries,)](
        bits, lists, counts, work.segments, work.entries, work.rules, batch, q_len, words,
        CAUSAL=causal, WINDOW=windowed, BLOCK_M=tile, WIDTH=width, BLOCK=block, num_warps=4,
    )  # fmt: skip
    k_bulk, v_bulk = bulk_of(key, columns), bulk_of(value, columns)
    bulk = k_bulk is not None and v_bulk is not None
    ends = all(s.k_len % block == 0 or s.k_start + s.k_len == key.shape[2] for s in segments)
    sink = request.sink_logits
    over_lists[(groups, entries)](
        query, key, value, k_bulk if bulk else key, v_bulk if bulk else value, out, lse if lse is not None else out,
        sink if sink is not None else out, bits.view(torch.int8), lists, counts,
        work.segments, work.entries, work.rules,
        *query.stride(), *key.stride(), *value.stride(), *out.stride(),
        *(lse.stride()[:2] if lse is not None else (0, 0)), batch, q_len, words, width,
        abs(scale_of(request.scaling, request.softcap)), request.softcap or 0.0,
        GROUPS=groups, DIM=dim, DIM_V=value_dim, PAD=pad, PAD_V=value_pad, CAUSAL=causal, WINDOW=windowed,
        HAS_CAP=request.softcap is not None, HAS_SINK=sink is not None, HAS_LSE=lse is not None, BULK=bulk,
        EDGES=bulk and ends and _BULK_EDGES, BLOCK_M=tile, BLOCK_N=columns, PIECES=block // columns, num_warps=4,
        num_stages=3 if columns == 64 else 2,
    )  # fmt: skip
    return AttentionResult(out, lse)


def choice_tile(width: int) -> tuple[int, int]:
    """Rows whose weights of so many blocks a program holds in registers, and its warps.

    Raises:
        ValueError: Too many blocks.
    """
    for most, rows, warps in ((128, 64, 4), (256, 64, 8), (1024, 32, 16), (2048, 16, 16)):
        if width <= most:
            return rows, warps
    raise ValueError(
        f"per_head: {width} blocks of keys, expected at most 2048; keep blocks of 128 keys or windows"
    )


def _masses(rules: HeadRules, device: torch.device) -> Tensor:
    """Float32 `[kv_heads, 2]` of masses and sinks; kept with the rules, which layers share."""
    memo = rules.__dict__.setdefault("_masses_on", {})
    if device not in memo:
        table = [(mass, float(sinks)) for mass, sinks in zip(rules.masses, rules.sinks, strict=True)]
        memo[device] = torch.tensor(table, dtype=torch.float32).to(device, non_blocking=True)
    masses: Tensor = memo[device]
    return masses
