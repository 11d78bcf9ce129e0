"""The launches of attention over kept blocks of keys: choice, lists, attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...attention.heads import HeadRules
from ...attention.request import AttentionRequest, AttentionResult
from ...attention.structure import Segment
from ..choice.launch import Lists, chosen_bits, lists_of, windows_beside
from ..launcher import Launcher, launch
from ..windows import HeadWindows
from . import hopper
from .bulk import bulk_of
from .kept import over_lists
from .prefill import blank
from .sizes import Tile, padded, scale_of
from .tables import MOST_ENTRIES, Kind, Tables, sheet_of, silent_runs

launch_over_lists = Launcher(over_lists)

_BULK_EDGES = True
"""As in `prefill`."""


def attend_blocks(
    request: AttentionRequest, rules: HeadRules, segments: Sequence[Segment], windows: HeadWindows | None
) -> AttentionResult:
    """All heads together, whatever each keeps.

    Raises:
        ValueError: More blocks than a row's weights can be held for.
    """
    query, key, value, structure = request.query, request.key, request.value, request.structure
    shown = windows_beside(rules, windows)
    bits, tile, tables, lists, blocks = walk_of(request, rules, segments, shown)
    if request.scaling < 0:
        query = -query
    dim, value_dim, block = query.shape[3], value.shape[3], rules.block
    groups, cap, sink = query.shape[1] // key.shape[1], request.softcap, request.sink_logits
    out, lse = blank(request, request.need_lse)
    lse_at, sink_at = out if lse is None else lse, out if sink is None else sink
    bitmap, scale = bits.view(torch.int8), abs(scale_of(request.scaling, cap))
    ends = all(s.k_len % block == 0 or s.k_start + s.k_len == key.shape[2] for s in segments)
    facts: dict[str, Any] = {
        "GROUPS": groups, "CAUSAL": structure.causal, "WINDOW": shown is not None, "HAS_SINK": sink is not None,
        "HAS_LSE": lse is not None,
    }  # fmt: skip
    warps = None
    if hopper.usable(key.device) and dim == value_dim and ends and cap is None and query.stride(3) == 1:
        warps = hopper.warps_of_kept(dim, groups, block)
    columns, form = (tile.columns, None) if warps is None else (warps.columns, hopper.layout())
    k_bulk, v_bulk = bulk_of(key, columns, layout=form), bulk_of(value, columns, layout=form)
    bulk = k_bulk is not None and v_bulk is not None
    if warps is not None and bulk:
        facts |= {"HEAD": dim, "BLOCK_N": warps.columns, "STAGES": warps.stages, "num_warps": 4}
    else:
        warps = None
        facts |= {
            "DIM": dim, "DIM_V": value_dim, "PAD": padded(dim), "PAD_V": padded(value_dim), "HAS_CAP": cap is not None,
            "BULK": bulk, "EDGES": bulk and ends and _BULK_EDGES, "PIECES": block // tile.columns, **tile.constants(),
        }  # fmt: skip
    for entries, *its_lists in zip(tables.launches(), *(t.split(MOST_ENTRIES) for t in lists), strict=True):
        asked = (
            query, key, value, k_bulk if bulk else key, v_bulk if bulk else value, out, lse_at, sink_at, bitmap,
            *its_lists, tables.segments, entries, tables.rules, *query.stride(), *key.stride(),
            *value.stride(), *out.stride(), *(lse.stride()[:2] if lse is not None else (0, 0)), *bits.shape[1:], blocks,
            scale, cap or 0.0,
        )  # fmt: skip
        if warps is None:
            launch(launch_over_lists, (groups, len(entries)), asked, facts)
        else:
            programs = len(entries) * (groups // warps.together)
            launch(hopper.launch_specialised_kept(), (programs,), asked, facts)
    return AttentionResult(out, lse)


class Walk(NamedTuple):
    """What each tile of rows reads: the bitmap of rows, sizes of a tile, work table, lists, most blocks of a list."""

    bits: Tensor
    tile: Tile
    tables: Tables
    lists: Lists
    blocks: int


def walk_of(
    request: AttentionRequest, rules: HeadRules, segments: Sequence[Segment], windows: HeadWindows | None
) -> Walk:
    """Chooses the blocks of every row and lists them by tile; `windows` are those of `windows_beside`."""
    key, structure, block = request.key, request.structure, rules.block
    bits = chosen_bits(request, rules, segments)
    tile = lists_tile(max(padded(request.query.shape[3]), padded(request.value.shape[3])), block)
    kind = Kind("queries", (tile.rows, tile.columns), key.shape[1], key.device)
    tables = sheet_of(kind, structure, segments, silent_runs(structure, segments)).tables(windows)
    blocks = -(-key.shape[2] // block)
    lists = lists_of(
        bits, tables.segments, tables.entries, tables.rules if windows else None,
        causal=structure.causal, rows=tile.rows, block=block, blocks=blocks,
    )  # fmt: skip
    return Walk(bits, tile, tables, lists, blocks)


def lists_tile(pad: int, block: int) -> Tile:
    """For a head size and keys per block, which a tile's columns divide."""
    return Tile(64, 64, 4, 3) if pad <= 128 else Tile(64, 32, 4, 2)
