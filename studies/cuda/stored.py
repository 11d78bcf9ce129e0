"""One decode step over a cache of codes beside one over bfloat16: time, bytes per second, error on the device."""

from __future__ import annotations

from adaattn_hf.attention.request import AttentionRequest
from adaattn_hf.attention.stored import StoredKV, hadamard, quantise
from adaattn_hf.attention.structure import CallStructure

from .measure import DIM, KV_HEADS, Cell, Section, by, captured, length, race, request, stock

BYTES = {"int8": 2 * DIM + 2, "k8v4": DIM + DIM // 2 + 2}
"""Bytes of a token of a key/value head, scales included."""


def stored(section: Section) -> None:
    """The attention step of one layer."""
    for batch in (1, 8):
        for thousand in (1, 8, 16, 32):
            for kind in BYTES:

                def cell(
                    row: Cell, batch: int = batch, n: int = length(thousand * 1024), kind: str = kind
                ) -> None:
                    _step(row, batch, n, kind)

                section.add(f"{batch} × {thousand}k, {kind}", cell)


def coded(r: AttentionRequest, kind: str) -> AttentionRequest:
    """A step over codes; keys are turned and smoothed as the cache does it."""
    mean = (r.key.float().mean(dim=2) @ hadamard(DIM, r.key.device)).contiguous()
    keys, key_scale = quantise(r.key, mean=mean)
    values, value_scale = quantise(r.value, bits=4 if kind == "k8v4" else 8)
    record = StoredKV(key_scale, value_scale, mean, r.key[:, :, 0].float().contiguous(), True)
    return AttentionRequest(r.query, keys, values, r.structure, r.scaling, stored=record)


def _step(row: Cell, batch: int, n: int, kind: str) -> None:
    """One kind of codes."""
    r = request(CallStructure(batch, 1, n, causal=True, q_offset=n - 1))
    exact = by("triton", r)().out.float()
    over = coded(r, kind)
    row["bytes"] = float(batch * KV_HEADS * n * BYTES[kind])
    arms = {"bf16, sdpa": stock(r), "bf16, triton": by("triton", r), "codes": by("triton", over)}
    race(row, arms | {f"{name}, captured": captured(call) for name, call in arms.items()})
    widened = over.widened()
    widened.key, widened.value = widened.key.to(r.key.dtype), widened.value.to(r.key.dtype)
    same = (by("triton", over)().out.float() - by("triton", widened)().out.float()).abs().max()
    row["note"] = (
        f"largest output {float(exact.abs().max()):.3f}; codes against the same numbers in bfloat16 {float(same):.1e}"
    )
