"""Which tile of the kernel over codes and how many programs of a step are fastest, on Qwen2.5-1.5B's shape.

Each time is of a graph of calls that take turns among as many caches as do not fit into the L2 cache together, with
the gaps between launches, as in a captured step of a model.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch

from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.stored import StoredKV, direction_of, mean_of, quantise
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends.triton import step
from adaattn_hf.backends.triton.storing import store

from .measure import DEVICE, DTYPE, FAILURES, ON_CUDA, attention_call, captured, length, microseconds, said

SHAPES = ((8, 4), (8, 16), (8, 32), (32, 8))
"""Rows and thousands of tokens."""
TILES = (
    (64, 2, 3, None), (64, 2, 3, 168), (64, 2, 2, None), (128, 2, 2, None), (128, 2, 3, None), (32, 1, 3, None),
    (32, 1, 4, None), (64, 1, 3, None), (128, 4, 3, 168),
)  # fmt: skip
"""Keys, warps, stages and most registers of a thread."""
WAVES, BITS = (2, 3, 4, 6, 8), {"bf16": 0, "int8": 8, "k8v4": 4}


def coded(r: AttentionCall, kind: str) -> AttentionCall:
    """A step over codes; keys are turned and smoothed as the cache does it."""
    mean = mean_of(r.key)
    keys, key_scale = quantise(r.key, mean=mean)
    values, value_scale = quantise(r.value, bits=BITS[kind])
    record = StoredKV(key_scale, value_scale, mean, r.key[:, :, 0].float().contiguous(), True)
    return AttentionCall(r.query, keys, values, r.structure, r.scaling, stored=record)


def _calls(rows: int, n: int, kind: str, copies: int, heads: tuple[int, int]) -> list[AttentionCall]:
    """Steps behind n tokens of a room that is a little larger, whose number lies on the device."""
    offset = torch.tensor(n - 1, device=DEVICE)
    structure = MaskStructure(rows, 1, n + length(128), causal=True, q_offset=offset)
    made = [attention_call(structure, heads=heads[0], kv_heads=heads[1]) for _ in range(copies)]
    return made if kind == "bf16" else [coded(one, kind) for one in made]


def _tile(kind: str, groups: int, tile: Sequence[int | None] | None = None, dim: int = 128) -> dict[str, Any]:
    constants = step.constants_of(groups, dim, dim, DTYPE, BITS[kind], DEVICE)
    if tile is not None:
        names = ("BLOCK_N", "num_warps", "num_stages", "maxnreg")
        constants |= dict(zip(names, tile, strict=True)) | {"WARPS": tile[1]}
    return constants


def _compile(kind: str, heads: tuple[int, int], tile: Sequence[int | None]) -> str | None:
    """Compiles a tile into the cache that all processes share; returns why that fails."""
    try:
        (call,) = _calls(8, length(4096), kind, 1, heads)
        step.attend_step(call, _tile(kind, heads[0] // heads[1], tile, call.query.shape[3]), graph=True)
    except FAILURES as error:
        return said(error)
    return None


def _each(calls: Sequence[AttentionCall], attend: Callable[[AttentionCall], Any]) -> float:
    """Microseconds of a call, in a graph of twelve at least."""
    times = -(-12 // len(calls)) if ON_CUDA else 1

    def all_calls() -> None:
        for call in [*calls] * times:
            attend(call)

    replay = captured(all_calls)
    return statistics.median(microseconds(replay, 30) for _ in range(3)) / (times * len(calls))


def _storing(call: AttentionCall) -> Callable[[], None]:
    """Rounds a token into a cache of codes, as a captured step does but for its counter."""
    assert call.stored is not None
    heads = call.key.shape[1]
    new, parts = call.query[:, :heads], (call.key, call.stored.key_scale, call.value, call.stored.value_scale)
    along = direction_of(call.query.expand(-1, -1, 16, -1), heads)
    return partial(store, new, new, parts, mean=call.stored.key_mean, along=along)


def raced(kind: str, heads: tuple[int, int] = (12, 2)) -> dict[str, dict[str, float | str]]:
    """Microseconds by variant and shape; a tile that does not compile says why."""
    if not BITS.get(kind):
        raise ValueError(f"kind: got {kind!r}, expected int8 or k8v4")
    tiles = list(TILES) if ON_CUDA else list(TILES[:1])
    pool = ProcessPoolExecutor(len(tiles), multiprocessing.get_context("spawn")) if ON_CUDA else None
    failed = list(pool.map(partial(_compile, kind, heads), tiles)) if pool else [None] * len(tiles)
    found: dict[str, dict[str, float | str]] = {}
    kept = step._WAVES, step._WAVES_OVER_CODES
    for rows, thousand in SHAPES if ON_CUDA else SHAPES[:1]:
        n = length(thousand * 1024)
        shape, copies = f"{rows} x {thousand}k", max(2, 262144 * 2 // (rows * n * heads[1])) if ON_CUDA else 1
        exact = _calls(rows, n, "bf16", copies, heads)
        dim = exact[0].query.shape[3]
        constants = _tile("bf16", heads[0] // heads[1], dim=dim)
        found.setdefault("bf16", {})[shape] = _each(exact, partial(step.attend_step, constants=constants, graph=True))
        del exact
        calls = _calls(rows, n, kind, copies, heads)
        stores = {id(call): _storing(call) for call in calls}
        found.setdefault("storing a token", {})[shape] = _each(calls, lambda call, own=stores: own[id(call)]())  # type: ignore[misc]
        for tile, why in zip(tiles, failed, strict=True):
            if why is not None:
                found[f"tile {tile}"] = {shape: why}
                continue
            constants = _tile(kind, heads[0] // heads[1], tile, dim)
            for waves in WAVES:
                step._WAVES = step._WAVES_OVER_CODES = waves
                attend = partial(step.attend_step, constants=constants, graph=True)
                found.setdefault(f"tile {tile}, {waves} programs", {})[shape] = _each(calls, attend)
            step._WAVES, step._WAVES_OVER_CODES = kept
        sys.stdout.write("".join(f"{shape} {name}: {own.get(shape)}\n" for name, own in found.items()))
        sys.stdout.flush()
    return found
