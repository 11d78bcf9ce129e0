"""Causal calls of few or middling tokens, where the host's way to a launch and how programs begin and end decide.

Through `auto`, as layers call it that follow the first one of a pass, beside torch's operator and the two backends of
which the built-in order takes one.
"""

from __future__ import annotations

from functools import partial

from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends import select

from .measure import ON_CUDA, Cell, Section, attention_call, by, length, medians, stock

HEADS = ((32, 8, 128), (9, 3, 64), (14, 2, 64))
TOKENS = (100, 300, 512, 900, 1024, 1500, 2048, 3000, 4096, 8192)
BATCHES = ((4, 300), (8, 512), (8, 1024))


def light(section: Section) -> None:
    """One sequence of each number of tokens, and batches, of three models' heads."""
    for heads, kv_heads, dim in HEADS:
        for batch, tokens in (*((1, n) for n in TOKENS), *BATCHES):
            name = f"{batch} × {tokens}, {heads}/{kv_heads} × {dim}"
            section.add(name, partial(_cell, batch=batch, n=length(tokens), shape=(heads, kv_heads, dim)))


def _cell(row: Cell, batch: int, n: int, shape: tuple[int, int, int]) -> None:
    heads, kv_heads, dim = shape
    asked = attention_call(MaskStructure(batch, n, n, causal=True), heads=heads, kv_heads=kv_heads, dim=dim)
    spec = asked.checked_kind()
    names = ("sdpa", "triton") if ON_CUDA else ("sdpa",)
    taken = select.choose(spec)
    calls = {"sdpa": stock(asked), "auto": by("auto", asked)}
    calls |= {f"by our {name}": by(name, asked) for name in names}
    row |= {**medians(calls), "auto takes": taken.name}
