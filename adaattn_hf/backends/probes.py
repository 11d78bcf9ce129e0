"""Random calls that stand for a class of calls."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..attention.request import AttentionRequest
from ..attention.structure import CallStructure
from .table import Cell

KINDS = ("full", "causal", "suffix", "window", "ragged", "step", "padded step")
SHORTEST = {"full": 2, "causal": 2, "suffix": 4, "window": 64, "ragged": 256, "padded step": 16}
"""Keys below which there is no such call, or nobody looks what it is."""
HEADS, _GROUPS = 32, 4
"""Query heads of an example on CUDA; of each key/value head where heads are grouped."""


def probes(device: str, cell: Cell, *, blank: bool = False) -> Iterator[AttentionRequest]:
    """Calls of a class: of its least and its greatest length; wide and narrow windows; packed and padded rows.

    Args:
        device: `cpu` or `cuda`.
        cell: The class.
        blank: Of tensors that are one number, for who asks about the calls and makes none.
    """
    generator = torch.Generator(device).manual_seed(0)
    dtype: torch.dtype = getattr(torch, cell.dtype)

    def draw(*shape: int) -> Tensor:
        if blank:
            return torch.zeros((), device=device, dtype=dtype).expand(shape)
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    for structure, heads in _shapes(device, cell):
        kv_heads = heads // _GROUPS if cell.grouped else heads
        q, k, v = (
            draw(structure.batch, n, h, cell.head_dim).transpose(1, 2)
            for n, h in ((structure.q_len, heads), (structure.kv_len, kv_heads), (structure.kv_len, kv_heads))
        )
        if structure.q_len == 1 and not blank:
            k, v = k.contiguous(), v.contiguous()  # as a cache holds them
        for tensor in (q, k, v):
            tensor.requires_grad_(cell.gradient)
        yield AttentionRequest(q, k, v, structure, scaling=cell.head_dim**-0.5)


def _shapes(device: str, cell: Cell) -> Iterator[tuple[CallStructure, int]]:
    """Structures with their query heads."""
    top = cell.length
    if top < SHORTEST.get(cell.kind, 1):
        return
    for n in dict.fromkeys((top // 2 + 1, top)):
        for key, structure in _structures(cell.kind, n, device).items():
            batch, heads = _extent(device, cell, structure, single=key == "packed")
            if batch != structure.batch:
                structure = _structures(cell.kind, n, device, batch)[key]
            yield structure, heads


def _structures(kind: str, n: int, device: str, batch: int = 1) -> dict[str, CallStructure]:
    """What the calls of a kind look like."""
    if kind == "full":
        return {kind: CallStructure(batch, n, n)}
    if kind == "causal":
        return {kind: CallStructure(batch, n, n, causal=True)}
    if kind == "suffix":
        rows = max(2, min(512, n // 4))
        return {kind: CallStructure(batch, rows, n, causal=True, q_offset=n - rows)}
    if kind == "window":
        return {f"{w}": CallStructure(batch, n, n, causal=True, window=w) for w in (n // 16, n // 4)}
    if kind == "step":
        return {kind: CallStructure(batch, 1, n, causal=True, q_offset=n - 1)}
    padding = torch.arange(n, device="cpu") >= torch.arange(batch, device="cpu")[:, None] * n // batch
    if kind == "padded step":
        offset = torch.tensor(max(n // 4 - 1, 0), dtype=torch.int64, device=device)
        return {
            "padded": CallStructure(batch, 1, n, causal=True, q_offset=n - 1, key_padding=padding.to(device)),
            "static": CallStructure(batch, 1, n, causal=True, q_offset=offset),
        }
    documents = (torch.arange(n, device="cpu") * 8 // n)[None].to(device)
    return {
        "padded": CallStructure(batch, n, n, causal=True, key_padding=padding.to(device)),
        "packed": CallStructure(1, n, n, causal=True, q_segments=documents, k_segments=documents),
    }


def _extent(device: str, cell: Cell, structure: CallStructure, *, single: bool) -> tuple[int, int]:
    """Examples and query heads that bring a structure into the class of work."""
    least = _GROUPS if cell.grouped else 1
    if device == "cuda":
        total = (1 << 3 * cell.work) // (structure.q_len * structure.kv_len)
    elif structure.q_len == 1:
        total = (
            (1 << 3 * cell.work)
            // (2 * structure.kv_len * cell.head_dim * getattr(torch, cell.dtype).itemsize)
            * least
        )
    else:
        total = 8 if structure.kv_len <= 512 else 4
    padded = cell.kind in ("ragged", "padded step") and not single
    batch = 1 if single else max(total // HEADS, 4 if padded else 1)
    return batch, max(total // batch // least, 1) * least
