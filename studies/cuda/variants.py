"""Other tiles of the Triton kernels than the package's, cell by cell: `best` is the fastest of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from adaattn_hf.attention.structure import CallStructure
from adaattn_hf.backends.triton import shapes, step, training
from adaattn_hf.backends.triton.sizes import Tile

from .kernels import PLANS
from .measure import (
    DEVICE,
    DIM,
    DTYPE,
    FAILURES,
    HEADS,
    KV_HEADS,
    ON_CUDA,
    Cell,
    Section,
    by,
    captured,
    length,
    microseconds,
    request,
    rules_of,
    said,
    stock,
)
from .stored import BYTES, coded

TRIED = None if ON_CUDA else 1
"""How many variants a trial tries."""
FORWARD = [
    Tile(64, 64, 4, 3),
    Tile(64, 64, 4, 2),
    Tile(64, 64, 4, 4),
    Tile(128, 64, 4, 3),
    Tile(128, 64, 8, 2),
    Tile(128, 64, 8, 3),
    Tile(128, 64, 8, 4),
    Tile(64, 128, 4, 2),
    Tile(128, 128, 8, 2),
    Tile(128, 128, 8, 3),
    Tile(64, 32, 4, 4),
    Tile(64, 128, 4, 3),
]


@contextmanager
def _instead(module: Any, name: str, value: Any, structure: CallStructure | None = None) -> Iterator[None]:
    """Another value of a module's name inside the block; what `structure` remembers of another value is dropped."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        if structure is not None:
            structure._memo.clear()
        yield
    finally:
        setattr(module, name, before)
        if structure is not None:
            structure._memo.clear()


def _each(
    row: Cell,
    module: Any,
    name: str,
    choices: list[Any],
    call: Callable[[], Any],
    as_is: bool = False,
    structure: CallStructure | None = None,
) -> None:
    """Times of a call under each choice; one that the device cannot hold is noted."""
    row["as it is"] = microseconds(call, 30)
    for choice in choices[:TRIED]:
        shown = "/".join(map(str, choice)) if isinstance(choice, tuple) else str(choice)
        try:
            with _instead(module, name, choice if as_is else lambda *_, c=choice: c, structure):
                row[shown] = microseconds(call, 30)
        except FAILURES as error:
            row.setdefault("refused", {})[shown] = said(error)
    times = {key: value for key, value in row.items() if isinstance(value, float) and key != "FLOP"}
    best = min(times, key=lambda key: times[key])
    row["note"] = f"best: {best}, {row['as it is'] / times[best]:.3f} times as it is"


def variants(section: Section) -> None:
    """Dense, padded, packed and windowed prefill; one query; both gradients."""
    long, n = length(16384), length(4096)
    documents = torch.repeat_interleave(torch.arange(16), long // 16)[None].to(DEVICE)
    left = torch.ones(8, n, dtype=torch.bool)
    for i in range(8):
        left[i, : n * i // 8] = False
    eight, longest = length(8192), length(32768)
    calls: dict[str, tuple[CallStructure, Any, int, int]] = {
        "dense 1 × 16k, 16/16": (CallStructure(1, long, long, causal=True), None, 16, DIM),
        "dense 4 × 4k": (CallStructure(4, n, n, causal=True), None, HEADS, DIM),
        "dense 1 × 32k": (CallStructure(1, longest, longest, causal=True), None, HEADS, DIM),
        "dense 2 × 8k, head 64": (CallStructure(2, eight, eight, causal=True), None, HEADS, DIM // 2),
        "packed 16 × 1k": (
            CallStructure(1, long, long, causal=True, q_segments=documents, k_segments=documents), None, HEADS, DIM,
        ),
        "left-padded 8 × 4k": (
            CallStructure(8, n, n, causal=True, key_padding=left.to(DEVICE), pads_queries=True), None, HEADS, DIM,
        ),
    }  # fmt: skip
    at_8k = CallStructure(1, eight, eight, causal=True)
    calls |= {f"8k, {name}": (at_8k, rules_of(windows), HEADS, DIM) for name, windows in PLANS.items()}
    for name, (structure, rules, heads, dim) in calls.items():

        def cell(
            row: Cell, s: CallStructure = structure, rules: Any = rules, heads: int = heads, dim: int = dim
        ) -> None:
            r = request(s, rules, heads=heads, kv_heads=heads if heads == 16 and HEADS != 16 else 8, dim=dim)
            if s.plain and rules is None:
                row["FLOP"] = 2.0 * s.batch * heads * s.q_len * s.q_len * dim
            _each(row, shapes, "forward_tile", FORWARD, by("triton", r), structure=s)
            if not s.plain or rules is not None:
                with _instead(shapes, "_BULK_EDGES", False, s):
                    row["edges without the copy engine"] = microseconds(by("triton", r), 30)

        section.add(name, cell)
    for batch, thousand in ((1, 32), (8, 32), (1, 128)):
        for name, windows in {"exact": (0,) * 8, **PLANS}.items():
            section.add(
                f"decode {batch} × {thousand}k, {name}",
                lambda row, b=batch, n=thousand, w=windows: _decode(row, b, length(n * 1024), w),  # type: ignore[misc]
            )
    section.add("training, window 1024 at 16k", lambda row: _training(row, long))


def _decode(row: Cell, batch: int, n: int, windows: tuple[int, ...]) -> None:
    """Waves, fewest keys of a program and tiles, each in a captured graph."""
    r = request(
        CallStructure(batch, 1, n, causal=True, q_offset=n - 1), rules_of(windows) if any(windows) else None
    )
    row["bytes"] = 2.0 * batch * DIM * DTYPE.itemsize * sum(min(w + 16, n) if w else n for w in windows)
    call = by("triton", r)
    row["as it is"] = microseconds(captured(call), 30)
    tiles = [(64, 4, 3), (128, 4, 3), (128, 8, 3), (64, 4, 4), (64, 2, 4)]
    _each_share(row, call, ("_WAVES", (1, 2, 3, 4, 6)), ("step_tile", tiles), 30)


def _each_share(
    row: Cell,
    call: Callable[[], object],
    waves: tuple[str, Sequence[Any]],
    tiles: tuple[str, Sequence[tuple[Any, ...]]],
    repeats: int,
) -> None:
    """Every number of waves with every tile of a step, by the names that `step` has for them, beside `as it is`."""
    times = {"as it is": row["as it is"]}
    for tile in tiles[1][:TRIED]:
        for count in waves[1][:TRIED]:
            try:
                with (
                    _instead(step, waves[0], count),
                    _instead(step, tiles[0], lambda *_, t=tile: Tile(1, *t)),
                ):
                    times[f"{count} waves, {tile}"] = microseconds(captured(call), repeats)
            except FAILURES as error:
                row.setdefault("refused", {})[f"{count} {tile}"] = said(error)
    row |= times
    best = min(times, key=lambda key: times[key])
    row["note"] = f"best: {best}, {row['as it is'] / times[best]:.3f} times as it is"


def codes(section: Section) -> None:
    """One query over codes: tiles, registers and waves, each in a captured graph."""
    for batch, thousand in ((1, 1), (1, 32), (8, 32)):
        for kind in BYTES:
            section.add(
                f"codes {batch} × {thousand}k, {kind}",
                lambda row, b=batch, n=thousand, kind=kind: _codes(row, b, length(n * 1024), kind),  # type: ignore[misc]
            )


def _codes(row: Cell, batch: int, n: int, kind: str) -> None:
    r = request(CallStructure(batch, 1, n, causal=True, q_offset=n - 1))
    row["bf16, sdpa"] = microseconds(captured(stock(r)), 30)
    call = by("triton", coded(r, kind))
    row["bytes"] = float(batch * KV_HEADS * n * BYTES[kind])
    row["as it is"] = microseconds(captured(call), 30)
    tiles = [
        (128, 4, 3, None),
        (128, 4, 3, 168),
        (128, 4, 4, None),
        (64, 2, 4, None),
        (64, 2, 5, None),
        (256, 8, 3, None),
    ]
    _each_share(
        row, call, ("_WAVES_OVER_CODES", [{8: n, 4: n} for n in (2, 3, 4)]), ("codes_tile", tiles), 15
    )


def _training(row: Cell, n: int) -> None:
    """Tiles of both gradient kernels, one after the other."""
    r = request(CallStructure(1, n, n, causal=True, window=length(1024)), grad=True)
    grad = torch.randn(1, n, HEADS, DIM, device=DEVICE, dtype=DTYPE)
    call = lambda: torch.autograd.grad(by("triton", r)().out, (r.query, r.key, r.value), grad)  # noqa: E731
    tiles = [
        Tile(64, 64, 4, 2),
        Tile(64, 64, 4, 3),
        Tile(64, 128, 8, 2),
        Tile(32, 64, 4, 3),
        Tile(64, 64, 8, 2),
    ]
    keys: Cell = {}
    _each(keys, training, "keys_tile", tiles, call)
    queries: Cell = {}
    tiles = [
        Tile(64, 64, 4, 2),
        Tile(64, 64, 4, 3),
        Tile(128, 64, 8, 2),
        Tile(128, 32, 8, 3),
        Tile(64, 32, 4, 3),
    ]
    _each(queries, training, "queries_tile", tiles, call)
    row |= {f"keys {key}": value for key, value in keys.items() if isinstance(value, float)}
    row |= {f"queries {key}": value for key, value in queries.items() if isinstance(value, float)}
    row["note"] = f"keys: {keys['note']}; queries: {queries['note']}"
