"""What a plan's windows can gain by the kernel for Hopper: pairs, the tiles that hold them, the fullest program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from adaattn_hf.attention.heads import ALL, HeadWindows
from adaattn_hf.attention.structure import CallStructure

from ..pages import percent, table
from .pairs import fewer_pairs, window_of

_DIM, _GROUPS = 64, 3
"""Channels of a head, and query heads per key/value head, of SmolLM2-135M."""
_PROGRAMS = 132
"""Multiprocessors of an H100 or H200, each of which computes items in turn (NVIDIA H100 whitepaper, 2022)."""


def tiles_of(windows: HeadWindows | None, kv_heads: int, length: int, batch: int) -> tuple[int, int]:
    """Tiles of a layer's prefill by the kernel for Hopper: of all programs, and of the one that has most.

    Args:
        windows: Keys and sinks of each key/value head; None: exact.
        kv_heads: Key/value heads.
        length: Tokens of a sequence.
        batch: Sequences.
    """
    from adaattn_hf.backends.triton import hopper
    from adaattn_hf.backends.triton.tables import Kind, sheet_of

    structure = CallStructure(batch, length, length, causal=True)
    warps = hopper.warps_of(_DIM, _GROUPS, windows is not None)
    if warps is None:
        raise ValueError(f"heads of {_DIM} channels: got no kernel for Hopper, expected one")
    pieces = 1 if windows is None else 2
    tile, parts = (warps.rows, warps.columns // pieces), _GROUPS // warps.together
    kind = Kind("queries", tile, kv_heads, torch.device("cpu"), parts, pieces, _PROGRAMS)
    sheet = sheet_of(kind, structure, structure.segments() or ())
    entries = sheet.tables(windows, evenly=True).entries.numpy()
    none = np.full((-len(entries) % _PROGRAMS, 3), -1, dtype=entries.dtype)
    items = np.concatenate([entries, none]).reshape(-1, _PROGRAMS, 3)
    rules = np.array(windows or ((ALL, 0),) * kv_heads)[np.maximum(items[..., 2], 0)]
    part = warps.columns // pieces
    start = np.maximum(items[..., 1] - rules[..., 0] + 1, 0) // part * part
    stop = np.minimum(items[..., 1] + warps.rows, length)
    read = -(-(stop - start) // part) + -(-np.minimum(rules[..., 1], start) // part)
    tiles = np.where(items[..., 2] < 0, 0, -(-read // pieces))
    return int(tiles.sum()), int(tiles.sum(0).max())


def bounds(picks: Sequence[str], kv_heads: int, length: int, batch: int) -> tuple[float, float] | None:
    """How many times fewer tiles a plan computes than exact attention, in all and by its layers' fullest programs.

    None where that depends on the data.
    """
    exact = np.array(tiles_of(None, kv_heads, length, batch))
    found = np.zeros(2)
    for at in range(0, len(picks), kv_heads):
        rules = [window_of(label) for label in picks[at : at + kv_heads]]
        if any(rule is None for rule in rules):
            return None
        windows = tuple(rule or (ALL, 0) for rule in rules)
        narrow = any(window < length for window, _ in windows)
        found += tiles_of(windows if narrow else None, kv_heads, length, batch)
    all_tiles, fullest = exact * (len(picks) // kv_heads) / found
    return float(all_tiles), float(fullest)


def section(study: Mapping[str, Any]) -> list[str]:
    """What bounds the plans of the first seed, as far as they were timed on Hopper."""
    speed = study.get("speed", {})
    timed, device = speed.get("attention", {}), speed.get("provenance", {}).get("device", "")
    if not any(name in device for name in ("H100", "H200")):
        return []
    rows = []
    for record in sorted((one for one in study["seeds"] if one["seed"] == 0), key=lambda one: one["budget"]):
        name = f"plan-{percent(record['budget'])}".replace(" ", "")
        for shape in (shape for shape, arms in timed.items() if name in arms):
            row = _row(record, name, shape, timed)
            rows += [] if row is None else [[name, shape, *row]]
    if not rows:
        return []
    head = ["plan", "length", "fewer pairs", "fewer tiles", "fewer of the fullest programs", "times our exact",
            "alone, µs a layer longer", "exact alone"]  # fmt: skip
    return [
        "### What bounds it",
        "",
        "The timed plans are those of the first seed. A tile holds 64 queries of three heads and 128 keys, whether "
        f"they are seen or not; {_PROGRAMS} programs compute blocks of queries in turn, and a launch ends with the "
        "fullest one. The rest is masks, and how blocks and launches begin and end: the last two columns say how much "
        "longer a sequence takes alone than as one of those that are timed at once. Narrow windows of few sequences go "
        "by another kernel, with smaller tiles.",
        "",
        *table(head, rows),
    ]


def _row(
    record: Mapping[str, Any], name: str, shape: str, timed: Mapping[str, Mapping[str, Any]]
) -> list[str] | None:
    """Cells of a timed plan; None where what it reads depends on the data."""
    picks, kv_heads = record["picks"], record["kv_heads"]
    *count, length = shape.split(" x ")
    batch = int(count[0]) if count else 1
    pairs, tiles = fewer_pairs(picks, int(length)), bounds(picks, kv_heads, int(length), batch)
    if pairs is None or tiles is None:
        return None
    alone = ["", ""]
    if batch > 1 and name in timed.get(length, {}):
        layers = len(picks) // kv_heads
        alone = [
            f"{(timed[length][arm]['seconds'] - timed[shape][arm]['seconds'] / batch) / layers * 1e6:.0f}"
            for arm in (name, "exact")
        ]
    gain = timed[shape]["exact"]["seconds"] / timed[shape][name]["seconds"]
    return [f"{pairs:.2f}", f"{tiles[0]:.2f}", f"{tiles[1]:.2f}", f"{gain:.2f}", *alone]
