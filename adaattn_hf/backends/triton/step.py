"""The launch of one query per sequence (decode): split-K over its keys, padding and offsets read on the device."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from ...attention.heads import ALL, HeadWindows, head_windows
from ...attention.request import AttentionRequest, AttentionResult, head_dim_of
from ...attention.structure import CallStructure
from .codes import decode_codes
from .decode import decode
from .launcher import Launcher, aligned
from .sizes import padded, rows_of, scale_of, tile_on
from .split import split
from .tables import capturing, window_table

launch_step = Launcher(decode)
launch_step_over_codes = Launcher(decode_codes)

# Programs per multiprocessor that a step is shared out among, and the fewest keys that one of them reads. Over values
# of 4 bits of many heads there are more: those take less of its shared memory. Of few heads the one program that puts
# a head's shares together would have too many of them.
_WAVES = 2
_WAVES_OVER_CODES = {8: 2, 4: 3}
_LEAST_KEYS = 256


def attend_step(
    request: AttentionRequest,
    graph: bool = False,
    windows: HeadWindows | None = None,
    until: int | None = None,
) -> AttentionResult:
    """Attention of one query per sequence in one launch, without a look at the data and without a copy of the cache.

    Args:
        request: The step.
        graph: Whether it is a node of a traced graph, in whose memory nothing may be kept. Nothing but padding cuts its
            batch rows then.
        windows: Of its heads where they are known; else those of its structure and rules.
        until: Position of a sequence from which on a query sees as if these had no end.

    Raises:
        ValueError: The structure is not made of segments.
    """
    query, key, value, structure = request.query, request.key, request.value, request.structure
    batch, heads, _, dim = query.shape
    kv_heads, kv_len, value_dim = key.shape[1], key.shape[2], head_dim_of(value)
    stored, sink, offset, device = request.stored, request.sink_logits, structure.q_offset, query.device
    windows = windows or head_windows(structure, request.per_head, kv_heads)
    if graph:
        rows, covered, sequences = None, True, structure.batch
        real = None if structure.key_padding is None else structure.key_padding.contiguous()
    else:
        rows, real, covered, sequences = _rows(structure, device)
    out = (torch.empty if covered else torch.zeros)(
        (batch, 1, heads, value_dim), dtype=query.dtype, device=device
    )
    lse = None
    if request.need_lse:
        lse = torch.empty((batch, heads, 1), dtype=torch.float32, device=device)
        if not covered:
            lse.fill_(float("-inf")) if sink is None else lse.copy_(sink[None, :, None])
    if not sequences:
        return AttentionResult(out, lse)
    groups = heads // kv_heads
    member_heads, pad, pad_v = rows_of(groups, 1), padded(dim), padded(value_dim)
    width = max(pad, pad_v) * query.itemsize
    if stored is None:
        kernel, waves, product_rows = "decode", _WAVES, max(16, member_heads)
    else:
        key, value, bits = _adjoining(key), _adjoining(value), 4 if value.dtype is torch.uint8 else 8
        waves = _WAVES_OVER_CODES[bits] if 4 * sequences * kv_heads > _processors(device) else _WAVES
        kernel, product_rows, pad, pad_v = (
            f"decode_codes {bits}",
            max(4, member_heads),
            max(32, pad),
            max(64, pad_v),
        )
    tile = tile_on(kernel, width, device, product_rows)
    graph = graph or capturing(device)
    programs, least = waves * _processors(device), max(tile.columns, _LEAST_KEYS)
    most, span = split(windows, kv_heads, kv_len, sequences, programs, least, until is not None)
    per_head = windows is not None and len(set(windows)) > 1
    rules = window_table(windows, device) if per_head and windows is not None else None
    window, sinks = windows[0] if windows else (ALL, 0)
    part, done = _scratch(
        sequences * heads * most * (value_dim + 2) if most > 1 else 0, sequences * kv_heads, device, graph
    )
    arguments: tuple[Any, ...] = (
        query, key, value, out, out if lse is None else lse, out if sink is None else sink, part, done,
        done if rows is None else rows, offset if isinstance(offset, Tensor) else done,
        done if real is None else real, done if rules is None else rules,
        query.stride(0), query.stride(1), query.stride(3), *key.stride(), *value.stride(),
        kv_len, offset if isinstance(offset, int) else 0, kv_heads, most, span, window, sinks,
        ALL if until is None else until,
        scale_of(request.scaling, request.softcap), float(request.softcap or 0.0),
    )  # fmt: skip
    constants: dict[str, Any] = {
        "GROUPS": groups, "ROWS": product_rows, "DIM": dim, "DIM_V": value_dim,
        "PAD": pad, "PAD_V": pad_v,
        "CAUSAL": structure.causal, "WINDOW": windows is not None, "PER_HEAD": per_head,
        "HAS_CAP": request.softcap is not None,
        "HAS_SINK": sink is not None, "HAS_LSE": lse is not None, "TABLE": rows is not None,
        "HAS_OFFSET": rows is None and isinstance(offset, Tensor), "HAS_REAL": real is not None,
        "FIND": rows is None and real is not None,
        "BLOCK_N": tile.columns, "HEADS": member_heads, "CHUNK": max(1, min(16, 8192 // (member_heads * pad_v))),
        "SINGLE": most == 1, "num_warps": tile.warps, "num_stages": tile.stages, "maxnreg": tile.registers,
    }  # fmt: skip
    grid = sequences, kv_heads * most
    optional = sink, real, offset if isinstance(offset, Tensor) else None
    plain = query.is_cuda and aligned(*optional)
    kind = (
        query.dtype, key.dtype, value.dtype, query.stride(), key.stride(), value.stride(), kv_heads,
        *(None if one is None else one.dtype for one in optional),
    )  # fmt: skip
    if stored is None:
        variant: Hashable = kind if plain and aligned(query, key, value) else None
        launch_step(grid, arguments, constants, variant)
        return AttentionResult(out, lse)
    mean, first, scales = stored.key_mean, stored.first_key, (stored.key_scale, stored.value_scale)
    strides = *scales[0].stride(), *scales[1].stride()
    constants |= {
        "BITS": bits, "HAS_MEAN": mean is not None, "HAS_FIRST": first is not None,
        "ROTATION": dim & -dim if stored.rotated else 0, "ROTATION_V": value_dim & -value_dim if stored.rotated else 0,
        "CLOSE": windows is None and rows is None and kv_len >= tile.columns and (pad, pad_v) == (dim, value_dim)
        and (key.stride(2), value.stride(2)) == (key.shape[3], value.shape[3]),
        "HALVES": tile.halves, "WARPS": tile.warps,
    }  # fmt: skip
    record = *scales, query if mean is None else mean, query if first is None else first
    plain = plain and aligned(query, key, value, *record)
    variant = (*kind, *strides, *(tensor.dtype for tensor in record)) if plain else None
    launch_step_over_codes(grid, (*arguments, *record, *strides), constants, variant)
    return AttentionResult(out, lse)


def _adjoining(codes: Tensor) -> Tensor:
    """Codes whose channels adjoin and whose rows begin at even addresses: as every cache lays them out."""
    *others, last = codes.stride()
    plain = last == 1 and not any(stride % 2 for stride in others) and codes.data_ptr() % 2 == 0
    return codes if plain else codes.contiguous()


@functools.cache
def _processors(device: torch.device) -> int:
    """Multiprocessors of a device; off CUDA, where kernels are interpreted, a few."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


_buffers: dict[tuple[torch.device, int], tuple[Tensor, Tensor]] = {}


def _scratch(floats: int, counters: int, device: torch.device, own: bool) -> tuple[Tensor, Tensor]:
    """Room for shares and counters of those that are done, which a step leaves at zero.

    Steps of a stream follow one another and share theirs. A graph has its `own`, as it may be replayed beside them.
    """
    if own:
        return (
            torch.empty(max(floats, 1), dtype=torch.float32, device=device),
            torch.zeros(counters, dtype=torch.int32, device=device),
        )
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    part, done = _buffers.get((device, stream), (None, None))
    if part is None or part.numel() < floats:
        part = torch.empty(max(floats, 1), dtype=torch.float32, device=device)
    if done is None or done.numel() < counters:
        done = torch.zeros(counters, dtype=torch.int32, device=device)
    _buffers[device, stream] = part, done
    return part, done


def _rows(structure: CallStructure, device: torch.device) -> tuple[Tensor | None, Tensor | None, bool, int]:
    """Sequences `[n, 4]` or None for whole batch rows, which keys are real, whether all rows are covered, how many."""
    if structure.kind == "irregular":
        raise ValueError("structure: a dense mask, expected runs; use the sdpa backend")
    if structure.one_run_a_row and (structure.window is None or structure.sinks_at_runs):
        if structure.key_padding is not None:
            return (*structure.derived(_rows_of_padding, device), True, structure.batch)
        return None, None, True, structure.batch
    segments = structure.segments()
    if segments is None:
        raise ValueError("structure: sinks beside chunks, expected runs; use the sdpa backend")
    return structure.derived(_rows_of_runs, device), None, len(segments) == structure.batch, len(segments)


def _rows_of_runs(structure: CallStructure, device: torch.device) -> Tensor:
    """Batch row, first key, number of keys and offset of each run."""
    rows = [(run.row, run.k_start, run.k_len, run.offset) for run in structure.segments() or ()]
    table = torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 4)
    return table.to(device, non_blocking=True)


def _rows_of_padding(structure: CallStructure, device: torch.device) -> tuple[Tensor, Tensor]:
    """The same of padded batch rows, up to their last real key, and the padding; made on the device."""
    padding = structure.key_padding
    assert padding is not None
    real = padding.to(device).contiguous()
    batch, kv_len = real.shape
    start = real.int().argmax(1)
    stop = kv_len - real.flip(1).int().argmax(1)
    seen = real.any(1)
    at = torch.zeros_like(start) + structure.q_offset
    count = torch.where(seen, stop - start, 0)
    return torch.stack([torch.arange(batch, device=device), start, count, at - start], dim=1), real
