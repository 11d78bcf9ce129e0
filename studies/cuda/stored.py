"""One decode step over a cache of codes beside one over bfloat16: time, bytes per second, error on the device."""

from __future__ import annotations

import re

from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.stored import StoredKV, mean_of, quantise
from adaattn_hf.attention.structure import MaskStructure

from .measure import DIM, KV_HEADS, Cell, Section, attention_call, by, captured, length, race, stock

ON_THE_PAGE = 128
"""Channels of a head in what the page shows; trials on a CPU are smaller."""


def bytes_of(kind: str, dim: int) -> int:
    """Bytes of a token of a key/value head, scales included."""
    return dim + (dim if kind == "int8" else dim // 2) + 2


BYTES = {kind: bytes_of(kind, DIM) for kind in ("int8", "k8v4")}


def steady(rows: list[Cell]) -> list[str]:
    """The rate at which each arm reads, and its fixed time, from the two longest cells of a batch and format.

    `microseconds = fixed + bytes / rate` has one answer for two lengths. Captured calls, so that no host is in it.
    """
    found: dict[tuple[str, str], list[tuple[int, Cell]]] = {}
    for row in rows:
        batch, thousand, kind = re.fullmatch(r"(\d+) × (\d+)k, (\w+)", row["cell"]).groups()  # type: ignore[union-attr]
        found.setdefault((batch, kind), []).append((int(thousand), row))
    lines = []
    for (batch, kind), cells in found.items():
        (short, less), (long, more) = sorted(cells, key=lambda cell: cell[0])[-2:]
        told = []
        for arm, times_as_many in (
            ("bf16, sdpa", 4 * ON_THE_PAGE / bytes_of(kind, ON_THE_PAGE)),
            ("codes", 1),
        ):
            read = [row["bytes"] * times_as_many for row in (less, more)]
            times = [row[f"{arm}, captured"] for row in (less, more)]
            if times[0] < times[1]:
                rate = (read[1] - read[0]) / (times[1] - times[0])
                told.append(f"`{arm}` reads at {rate * 1e-6:.2f} TB/s, plus {times[1] - read[1] / rate:.0f} µs fixed")
        lines.append(f"* {kind}, from {batch} × {short}k to {batch} × {long}k: {'; '.join(told)}")
    return lines


def apart(rows: list[Cell]) -> str:
    """How far codes are from the same numbers in bfloat16, at most."""
    most = max(row["difference"] / row["largest"] for row in rows)
    return f"* `codes` differs from the same numbers in bfloat16 by at most {most:.1%} of the largest output."


def stored(section: Section) -> None:
    """The attention step of one layer."""
    for batch in (1, 8):
        for thousand in (1, 8, 16, 32):
            for kind in BYTES:

                def cell(row: Cell, batch: int = batch, n: int = length(thousand * 1024), kind: str = kind) -> None:
                    _step(row, batch, n, kind)

                section.add(f"{batch} × {thousand}k, {kind}", cell)


def coded(r: AttentionCall, kind: str) -> AttentionCall:
    """A step over codes; keys are turned and smoothed as the cache does it."""
    mean = mean_of(r.key)
    keys, key_scale = quantise(r.key, mean=mean)
    values, value_scale = quantise(r.value, bits=4 if kind == "k8v4" else 8)
    record = StoredKV(key_scale, value_scale, mean, r.key[:, :, 0].float().contiguous(), True)
    return AttentionCall(r.query, keys, values, r.structure, r.scaling, stored=record)


def _step(row: Cell, batch: int, n: int, kind: str) -> None:
    """One kind of codes."""
    r = attention_call(MaskStructure(batch, 1, n, causal=True, q_offset=n - 1))
    exact = by("triton", r)().out.float()
    over = coded(r, kind)
    row["bytes"] = float(batch * KV_HEADS * n * BYTES[kind])
    arms = {"bf16, sdpa": stock(r), "bf16, triton": by("triton", r), "codes": by("triton", over)}
    race(row, arms | {f"{name}, captured": captured(call) for name, call in arms.items()})
    dequantised = over.dequantised()
    dequantised.key, dequantised.value = dequantised.key.to(r.key.dtype), dequantised.value.to(r.key.dtype)
    same = (by("triton", over)().out.float() - by("triton", dequantised)().out.float()).abs().max()
    row |= {"largest": float(exact.abs().max()), "difference": float(same)}
