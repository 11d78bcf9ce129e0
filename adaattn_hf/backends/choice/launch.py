"""Launches the kernels that choose blocks of keys: a bitmap per row, and lists of blocks per tile of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ...attention.heads import HeadRules
from ...attention.request import AttentionRequest
from ...attention.segments import Segment
from ..capability import GRID
from ..launcher import Launcher, launch
from ..windows import ALL, HeadWindows
from .kernels import choose, listing, pool

launch_pool, launch_choose, launch_listing = Launcher(pool), Launcher(choose), Launcher(listing)

_STEPS = 10
"""Halvings of the range in which the logarithm of a row's least kept weight lies: some 15 at most, in powers of two."""
_NARROWEST = 64
"""Smallest number of blocks that a launch reserves registers for; early rows of a causal call see no more."""
_STAYING = 1 << 15
"""Most numbers in the mean keys that are kept in shared memory for all query heads of a key/value head."""
_PART = 1 << 14
"""Where there are more, how many of them a program multiplies at a time."""


class Lists(NamedTuple):
    """Blocks of a tile that need a mask, their counts; blocks that all rows see whole, their counts. All int32."""

    some: Tensor
    some_n: Tensor
    every: Tensor
    every_n: Tensor


def chosen_bits(request: AttentionRequest, rules: HeadRules, segments: Sequence[Segment]) -> Tensor:
    """Bitmap of the blocks that each row keeps, int32 `[kv_heads, batch, q_len, words]`.

    Raises:
        ValueError: More blocks than a row's weights can be held for.
    """
    query, key, structure = request.query, request.key, request.structure
    if request.scaling < 0:
        query = -query
    batch, heads, q_len, dim = query.shape
    kv_heads, block, device = key.shape[1], rules.block, query.device
    blocks = max((-(-s.k_len // block) for s in segments), default=1)
    widest = width_of(blocks)
    choice_tile(widest)
    bits = torch.empty((kv_heads, batch, q_len, widest // 32), dtype=torch.int32, device=device)
    if not segments:
        return bits
    pad = max(16, triton.next_power_of_2(dim))
    all_runs: Tensor = structure.cached(
        ("runs", device), lambda: torch.tensor(segments, dtype=torch.int32, device="cpu").to(device)
    )
    masses, longest = _masses(rules, device), max(s.q_len for s in segments)
    for runs in all_runs.split(GRID):
        pooled = key.new_empty((2, len(runs), kv_heads, blocks, pad))
        asked = key, pooled, runs, *key.stride(), blocks
        facts = {"DIM": dim, "PAD": pad, "BLOCK": block, "num_warps": 4}
        launch(launch_pool, (blocks, kv_heads, len(runs)), asked, facts)
        width, least = min(widest, _NARROWEST) if structure.causal else widest, -1
        while width <= widest:
            rows, warps, stages = choice_tile(width)
            part = pad if pad * width <= _STAYING else max(16, _PART // width)
            of_rows = (
                query, pooled, bits, runs, masses, *query.stride(), blocks, batch, q_len, widest // 32,
                abs(request.scaling), request.softcap or 0.0,
            )  # fmt: skip
            facts = {
                "GROUPS": heads // kv_heads, "DIM": dim, "PAD": pad, "PART": min(pad, part), "CAUSAL": structure.causal,
                "HAS_CAP": request.softcap is not None, "ROWS": rows, "LEAST": least, "WIDTH": width, "BLOCK": block,
                "STEPS": _STEPS, "num_warps": warps, "num_stages": stages,
            }  # fmt: skip
            launch(launch_choose, (-(-longest // rows), kv_heads, len(runs)), of_rows, facts)
            least, width = width, 2 * width
    return bits


def width_of(blocks: int) -> int:
    """Bits of a row's bitmap: a power of two, at least 32."""
    return max(32, 1 << (blocks - 1).bit_length())


def choice_tile(width: int) -> tuple[int, int, int]:
    """Rows per program, warps and pipeline stages for rows that see up to `width` blocks; weights stay in registers.

    Raises:
        ValueError: Too many blocks.
    """
    for most, rows, warps, stages in (
        (128, 64, 4, 2),
        (256, 128, 8, 1),
        (512, 32, 8, 2),
        (1024, 32, 16, 2),
        (2048, 16, 16, 2),
    ):
        if width <= most:
            return rows, warps, stages
    raise ValueError(
        f"per_head: {width} blocks of keys, expected at most 2048; keep blocks of 128 keys or windows"
    )


def lists_of(
    bits: Tensor,
    runs: Tensor,
    work: Tensor,
    windows: Tensor | None,
    *,
    causal: bool,
    rows: int,
    block: int,
    blocks: int,
    tiles: int = 1,
    copies: int = 1,
) -> Lists:
    """The lists of every entry of a work table.

    Args:
        bits: Of `chosen_bits`.
        runs: Int32 `[runs, 6]`.
        work: Int32 `[entries, 3]`: run, first row, key/value head.
        windows: Int32 `[kv_heads, 2]`, window and sinks, None where no head has a window.
        causal: The call's.
        rows: Of a tile.
        block: Keys per block.
        blocks: Most blocks of a list.
        tiles: Entries that follow one another before their copies do.
        copies: Of each list.
    """
    _, batch, q_len, words = bits.shape
    entries = work.shape[0]
    shape = (entries * copies,)
    made = Lists(*(bits.new_empty(s) for s in ((*shape, blocks), shape) * 2))
    asked = bits, *made, runs, work, work if windows is None else windows, batch, q_len, words, blocks, tiles
    facts = {
        "CAUSAL": causal, "WINDOW": windows is not None, "COPIES": copies, "BLOCK_M": rows, "WIDTH": 32 * words,
        "BLOCK": block, "num_warps": 4,
    }  # fmt: skip
    launch(launch_listing, (entries,), asked, facts)
    return made


def windows_beside(rules: HeadRules, windows: HeadWindows | None) -> HeadWindows | None:
    """The windows of heads that keep no blocks; a head that does has its sinks among its blocks."""
    beside = windows or ((ALL, 0),) * len(rules.masses)
    shown = tuple(
        (ALL, 0) if mass and window == ALL else (window, sinks)
        for mass, (window, sinks) in zip(rules.masses, beside, strict=True)
    )
    return shown if any(window != ALL for window, _ in shown) else None


def _masses(rules: HeadRules, device: torch.device) -> Tensor:
    """Float32 `[kv_heads, 2]` of masses and sinks; kept with the rules, which layers share."""
    memo = rules.__dict__.setdefault("_masses_on", {})
    if device not in memo:
        table = [(mass, float(sinks)) for mass, sinks in zip(rules.masses, rules.sinks, strict=True)]
        memo[device] = torch.tensor(table, dtype=torch.float32, device="cpu").to(device, non_blocking=True)
    masses: Tensor = memo[device]
    return masses
