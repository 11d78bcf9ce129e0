"""The launch of one query per sequence (decode): split-K over its keys, padding and offsets read on the device."""

import functools
from collections import Counter
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from ...attention.call import AttentionCall, AttentionResult
from ...attention.heads import ALL, HeadWindows, head_windows
from ...attention.pages import Pages
from ...attention.structure import MaskStructure
from ..base import capturing, derived_on
from .codes import decode_codes
from .decode import combine, decode
from .launch import aligned, device_facts
from .tables import window_table
from .tiling import fitting_tile, padded, rows_of, scale_of

# Programs per multiprocessor that a step is shared out among, and the fewest keys that one of them reads. Over codes
# there are more, as those of three stages are small; but not of few heads, of which the one program that puts a head's
# shares together would have too many: graphs have a launch for that.
_WAVES = 2
_WAVES_OVER_CODES = 4
_LEAST_KEYS = 256
_MOST_STREAMS = 64

Spans = tuple[tuple[int, int], ...]
"""Numbers of spans of keys, the last of which may not be full, and how many sequences have so many."""


def constants_of(
    groups: int, dim: int, value_dim: int, dtype: torch.dtype, bits: int, device: torch.device
) -> dict[str, Any]:
    """The constants of the kernel that lengths do not change; `groups` query heads share keys.

    Values are codes of `bits`, 0 for numbers.
    """
    member_heads, pad, pad_v = rows_of(groups, 1), padded(dim), padded(value_dim)
    width = max(pad, pad_v) * dtype.itemsize
    kernel, rows = "decode", max(16, member_heads)
    if bits:
        kernel, rows, pad, pad_v = f"decode_codes {bits}", max(4, member_heads), max(32, pad), max(64, pad_v)
    tile = fitting_tile(kernel, width, device_facts(device).memory, rows)
    constants = {
        "GROUPS": groups, "ROWS": rows, "DIM": dim, "DIM_V": value_dim, "PAD": pad, "PAD_V": pad_v,
        "BLOCK_N": tile.columns, "HEADS": member_heads, "CHUNK": max(1, min(16, 8192 // (member_heads * pad_v))),
        "num_warps": tile.warps, "num_stages": tile.stages, "maxnreg": tile.registers,
    }  # fmt: skip
    return constants | {"BITS": bits, "SUMS": tile.sums, "WARPS": tile.warps} if bits else constants


def attend_step(
    call: AttentionCall,
    constants: dict[str, Any],
    windows: HeadWindows | None = None,
    graph: bool = False,
    until: int | None = None,
) -> AttentionResult:
    """Attention of one query per sequence in one launch, without a look at the data and without a copy of the cache.

    `constants` are those of `constants_of`, `windows` those of the rules and the structure where none are given.
    Nothing may be kept in the memory of a traced `graph`, and nothing but padding cuts its batch rows. From position
    `until` of a sequence on, which rules may say, too, a query sees as if windows had no end.
    """
    query, key, value, structure = call.query, call.key, call.value, call.structure
    stored, softcap, sink = call.stored, call.softcap, call.sink_logits
    batch, heads, _, dim = query.shape
    kv_heads, kv_len, value_dim = key.shape[1], key.shape[2], constants["DIM_V"]
    offset, device = structure.q_offset, query.device
    pages = structure if isinstance(structure, Pages) else None
    windows = windows or head_windows(structure, call.per_head, kv_heads)
    until = until if call.per_head is None else call.per_head.until
    if stored is not None:
        stored.check_device(device)

    # the sequences: where their keys lie, and which of these are real
    if graph:
        rows, covered, sequences = None, True, structure.batch
        real = None if structure.key_padding is None else structure.key_padding.contiguous()
    elif pages is not None:
        rows, real, covered, sequences = pages.table, None, True, batch
    else:
        rows, real, covered, sequences = _rows(structure, device)
    out = (torch.empty if covered else torch.zeros)((batch, 1, heads, value_dim), dtype=query.dtype, device=device)
    lse = None
    if call.need_lse:
        lse = torch.empty((batch, heads, 1), dtype=torch.float32, device=device)
        if not covered:
            lse.fill_(float("-inf")) if sink is None else lse.copy_(sink[None, :, None])
    if not sequences:
        return AttentionResult(out, lse)

    # into how many shares the keys of a head are split, and the room in which programs leave their parts
    waves, processors = _WAVES, device_facts(device).processors
    if stored is not None:
        key, value = _adjoining(key), _adjoining(value)
        if constants["num_stages"] > 2 and (graph or 4 * sequences * kv_heads > processors):
            waves = _WAVES_OVER_CODES
    least = max(constants["BLOCK_N"], _LEAST_KEYS)
    spans: Spans = ((-(-(kv_len if pages is None else pages.longest) // least), sequences),)
    if rows is not None and real is None and pages is None:
        spans = structure.cached(_spans_of_runs, least)
    programs = waves * processors
    shares, span = split(windows, kv_heads, spans, programs, least)
    whole_shares = shares if until is None else split(None, kv_heads, spans, programs, least)[0]
    shares = max(shares, whole_shares)
    last = not graph  # a graph would set the counters to zero by a launch that can as well merge heads side by side
    room = sequences * heads * shares * (value_dim + 2) if shares > 1 else 0, sequences * kv_heads * last, device
    captured = capturing(device)
    # layers of a captured step follow one another, and the structure is that of one pass: they share what it has
    part, done = structure.cached(_graph_scratch, *room) if pages and captured else _scratch(*room, graph or captured)

    # what the kernel is told
    per_head = windows is not None and len(set(windows)) > 1
    rules = window_table(windows, device) if per_head and windows is not None else None
    window, sinks = max(windows, key=sum) if windows else (ALL, 0)
    moving = offset if isinstance(offset, Tensor) else None if pages is None else pages.borders
    strides = query.stride(), key.stride(), value.stride()
    # what the kernel does not read by its constants is filled by tensors of the same kind
    arguments: tuple[Any, ...] = (
        query, key, value, out, out if lse is None else lse, out if sink is None else sink, part, done,
        done if rows is None else rows, done if moving is None else moving,
        done if real is None else real, done if rules is None else rules,
        strides[0][0], strides[0][1], strides[0][3], *strides[1], *strides[2],
        kv_len, offset if moving is None else 0, kv_heads, shares, whole_shares,
        least if pages or (per_head and rows is None) else span, window, sinks,
        ALL if until is None else until, scale_of(call.scaling, softcap), float(softcap or 0.0),
    )  # fmt: skip
    constants = {
        **constants, "CAUSAL": structure.causal, "WINDOW": windows is not None, "PER_HEAD": per_head,
        "HAS_CAP": softcap is not None, "HAS_SINK": sink is not None, "HAS_LSE": lse is not None,
        "TABLE": rows is not None and pages is None, "HAS_OFFSET": rows is None and moving is not None,
        "HAS_REAL": real is not None,
        "FIND": rows is None and real is not None, "SINGLE": shares == 1, "LAST": last,
    }  # fmt: skip
    grid = sequences, kv_heads * shares
    # the compiled variant depends on these, and on whether all tensors are aligned
    kind: tuple[Hashable, ...] = (
        query.dtype, key.dtype, value.dtype, strides, kv_heads, sink is not None and sink.dtype,
        real is not None and real.dtype, moving is not None and moving.dtype,
    )  # fmt: skip
    kernel, rotation = decode, 0
    beside: tuple[Tensor, ...] = ()
    more: tuple[Any, ...] = query, query, 0, 0, 0, 0, 0, 0, 0
    if pages is not None:
        assert call.new_tokens is not None, "the step that reads pages writes its own tokens into them"
        own_k, own_v = call.new_tokens
        steps = *(own_k.stride(n) for n in (0, 1, 3)), *(own_v.stride(n) for n in (0, 1, 3))
        more, beside = (own_k, own_v, *steps, pages.table.stride(0)), (own_k, own_v, pages.table)
        kind = *kind, steps, pages.table.dtype
        one_page = not pages.page % constants["BLOCK_N"]
        # every second stage is for the pages of a tile's keys
        constants |= {"PAGE": pages.page, "ONE_PAGE": one_page, "num_stages": 2 * constants["num_stages"] - 1}
    elif stored is None:
        constants |= {"PAGE": 0, "ONE_PAGE": False}
    else:
        kernel, rotation = decode_codes, value_dim & -value_dim
        mean, first, scales = stored.key_mean, stored.first_key, (stored.key_scale, stored.value_scale)
        steps = *scales[0].stride(), *scales[1].stride()
        beside = *scales, query if mean is None else mean, query if first is None else first
        more, kind = (*beside, *steps), (*kind, steps, *(tensor.dtype for tensor in beside))
        constants |= {
            "HAS_MEAN": mean is not None, "HAS_FIRST": first is not None,
            "ROTATION": dim & -dim, "ROTATION_V": rotation,
            "CLOSE": windows is None and rows is None and kv_len >= constants["BLOCK_N"]
            and (constants["PAD"], constants["PAD_V"]) == (dim, value_dim)
            and (strides[1][2], strides[2][2]) == (key.shape[3], value.shape[3]),
        }  # fmt: skip
    variant = kind if aligned(query, key, value, sink, real, moving, *beside) else None
    kernel(grid, (*arguments, *more), constants, variant)
    if not last and shares > 1:
        constants = {name: constants[name] for name in ("DIM_V", "PAD_V", "HAS_SINK", "HAS_LSE")}
        constants |= {"CHUNK": max(1, min(64, 8192 // constants["PAD_V"])), "ROTATION_V": rotation}
        sink_dtype = sink is not None and sink.dtype
        combine((sequences, heads), (*arguments[3:7], shares), constants, variant and (query.dtype, sink_dtype))
    return AttentionResult(out, lse)


def _graph_scratch(structure: MaskStructure, floats: int, counters: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return _scratch(floats, counters, device, True)


def _spans_of_runs(structure: MaskStructure, least: int) -> Spans:
    return tuple(sorted(Counter(-(-run.k_len // least) for run in structure.segments() or ()).items()))


@functools.lru_cache(1024)
def split(windows: HeadWindows | None, kv_heads: int, spans: Spans, programs: int, least: int) -> tuple[int, int]:
    """Into how many shares the head that reads most splits its keys, and how many keys a share has.

    The same for `least` lengths in a row, the fewest keys worth a program, so that steps of a generation round alike,
    and are worked out once. `programs` run at once; there are no more shares unless each head has one.
    """
    reads: Counter[int] = Counter()
    for length, sequences in spans:
        for window, sinks in ((ALL, 0),) * kv_heads if windows is None else windows:
            reads[max(1, min(window + sinks, length * least))] += sequences
    longest = max(reads)
    total = sum(keys * times for keys, times in reads.items())
    shares = max(1, min(longest // least, programs * longest // total))
    while shares > 1 and sum(times * -(-keys // -(-longest // shares)) for keys, times in reads.items()) > programs:
        shares -= 1
    span = -(-longest // shares)
    return -(-longest // span), span


def _adjoining(codes: Tensor) -> Tensor:
    """Codes whose channels adjoin and whose rows begin at even addresses: as every cache lays them out."""
    *others, last = codes.stride()
    plain = last == 1 and not any(stride % 2 for stride in others) and codes.data_ptr() % 2 == 0
    return codes if plain else codes.contiguous()


_buffers: dict[tuple[torch.device, int], tuple[Tensor, Tensor]] = {}


def _scratch(floats: int, counters: int, device: torch.device, of_graph: bool) -> tuple[Tensor, Tensor]:
    """Room for shares and counters of those that are done, which a step leaves at zero.

    Steps of a stream follow one another and share theirs. A graph has its own: it may be replayed at the same time.
    """
    stream, part, done = 0, None, None
    if not of_graph:
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        part, done = _buffers.get((device, stream), (None, None))
    if part is None or part.numel() < floats:
        part = torch.empty(max(floats, 1), dtype=torch.float32, device=device)
    if done is None or done.numel() < counters:
        done = torch.zeros(counters, dtype=torch.int32, device=device)
    if not of_graph:
        if len(_buffers) >= _MOST_STREAMS and (device, stream) not in _buffers:
            _buffers.clear()  # torch gives the memory to later work of the same stream alone
        _buffers[device, stream] = part, done
    return part, done


def _rows(structure: MaskStructure, device: torch.device) -> tuple[Tensor | None, Tensor | None, bool, int]:
    """Sequences `[n, 4]` or None for whole batch rows, which keys are real, whether all rows are covered, how many."""
    if structure.one_run_a_row:
        if structure.key_padding is not None:
            return (*derived_on(structure, device, _rows_of_padding), True, structure.batch)
        return None, None, True, structure.batch
    segments = structure.segments()
    assert segments is not None, "dense masks, and sinks elsewhere than where runs begin, are refused"
    rows = derived_on(structure, device, _rows_of_runs)
    return rows, None, len(segments) == structure.batch, len(segments)


def _rows_of_runs(structure: MaskStructure, device: torch.device) -> Tensor:
    """Batch row, first key, number of keys and offset of each run."""
    rows = [(run.row, run.k_start, run.k_len, run.offset) for run in structure.segments() or ()]
    table = torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 4)
    return table.to(device, non_blocking=True)


def _rows_of_padding(structure: MaskStructure, device: torch.device) -> tuple[Tensor, Tensor]:
    """The same of padded batch rows, up to their last real key, and the padding; made on the device."""
    padding = structure.key_padding
    assert padding is not None
    real = padding.to(device).contiguous()
    batch, kv_len = real.shape
    start = real.int().argmax(1)
    stop = kv_len - real.flip(1).int().argmax(1)
    some_real = real.any(1)
    places = torch.zeros_like(start) + structure.q_offset
    count = torch.where(some_real, stop - start, 0)
    return torch.stack([torch.arange(batch, device=device), start, count, places - start], dim=1), real
