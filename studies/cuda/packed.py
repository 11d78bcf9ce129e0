"""Packed and padded calls beside dense ones of the same visible pairs, and whole models that once lost to stock."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from transformers import BertConfig, BertModel

import adaattn_hf
from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.structure import MaskStructure

from .kernels import FLASH, masks
from .measure import (  # fmt: skip
    DEVICE,
    DIM,
    DTYPE,
    HEADS,
    KV_HEADS,
    ON_CUDA,
    Cell,
    Section,
    attention_call,
    by,
    draw,
    length,
    microseconds,
    race,
    refusals,
    timed,
)

PROMPTS = (50, 700, 1311, 3000, 87, 420, 2222, 930, 15, 1700, 640, 512, 333, 2048, 99, 4000)
"""Tokens of a batch of prompts, whose padding `prepare` takes out."""


def packed(section: Section) -> None:
    """All cells."""
    structures = masks()
    section.add("packed 16 × 1k", lambda row: _beside_dense(row, structures["packed 16 × 1k"], [(16, length(1024))]))
    for name, lengths in (("8 × 3000", (3000,) * 8), ("16 prompts of 15 to 4,000 tokens", PROMPTS)):
        uneven = tuple(length(n) for n in lengths)
        section.add(f"packed {name}", partial(_documents, lengths=uneven))
    n = length(4096)
    rows = [(1, n - n * i // 8) for i in range(8)]
    section.add("left-padded 8 × 4k", lambda row: _beside_dense(row, structures["left-padded 8 × 4k"], rows))
    section.add("BERT-base, 16 rows of 512 to 12 tokens", _bert)
    for n in (1024, 4096):
        section.add(f"float32, causal {n // 1024}k, 32/8 × 128", lambda row, n=n: _grouped(row, length(n)))  # type: ignore[misc]


def _documents(row: Cell, lengths: tuple[int, ...]) -> None:
    """Documents of these lengths in one row."""
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None].to(DEVICE)
    n = sum(lengths)
    runs = MaskStructure(1, n, n, causal=True, q_segments=numbers, k_segments=numbers)
    _beside_dense(row, runs, [(1, n) for n in lengths])


def _beside_dense(row: Cell, structure: MaskStructure, runs: list[tuple[int, int]]) -> None:
    """A call of runs beside dense calls of the same `(batch, length)` by their fastest kernel, one after another."""
    row["FLOP"] = sum(2.0 * batch * HEADS * n * n * DIM for batch, n in runs)
    row["dense"] = 0.0
    for batch, n in runs:
        r = attention_call(MaskStructure(batch, n, n, causal=True))
        names = [name for name in (*FLASH, "triton", "sdpa") if not refusals(name, r)]
        row["dense"] += min(microseconds(by(name, r), 20) for name in names)
    r = attention_call(structure)
    timed(row, r, *FLASH, "triton", "auto", beside={})


@torch.no_grad()
def _bert(row: Cell) -> None:
    """A padded batch through an encoder: stock sdpa, ours, and ours with the padding taken out around the model."""
    layers, longest = (12, 512) if ON_CUDA else (2, 24)
    config = BertConfig(num_hidden_layers=layers)
    torch.manual_seed(0)
    stock = BertModel._from_config(config, dtype=DTYPE if ON_CUDA else torch.float32, attn_implementation="sdpa")
    stock = stock.eval().to(DEVICE)
    real = torch.linspace(longest, 12, 16).round().long()
    mask = (torch.arange(longest)[None] < real[:, None]).long().to(DEVICE)
    inputs = {"input_ids": torch.ones(16, longest, dtype=torch.long, device=DEVICE), "attention_mask": mask}
    ours = copy.deepcopy(stock)
    ours.set_attn_implementation("adaattn")
    bare: Any = copy.deepcopy(ours)
    bare = adaattn_hf.prepare(bare)
    arms = {"stock": stock, "auto": ours, "prepared": bare}
    race(row, {name: partial(one, **inputs) for name, one in arms.items()})


def _grouped(row: Cell, n: int) -> None:
    """Grouped heads in float32, where a fused kernel would write the whole score matrix."""
    q, k, v = (draw(1, n, h).float() for h in (HEADS, KV_HEADS, KV_HEADS))
    r = AttentionCall(q, k, v, MaskStructure(1, n, n, causal=True), DIM**-0.5)
    row["FLOP"] = 2.0 * HEADS * n * n * DIM
    timed(row, r, "auto", "eager", beside={"stock": lambda: _eager(q, k, v)})


def _eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """What Transformers' eager attention does with a causal mask."""
    groups, n = q.shape[1] // k.shape[1], q.shape[2]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    mask = torch.full((n, n), torch.finfo(q.dtype).min, device=q.device).triu(1)
    weights = torch.softmax(q @ k.transpose(2, 3) * DIM**-0.5 + mask, dim=-1, dtype=torch.float32)
    return (weights.to(q.dtype) @ v).transpose(1, 2).contiguous()
