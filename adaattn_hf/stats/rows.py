"""Samples query rows, stratified by position, and computes their logits and attention weights.

Every statistic costs O(n * s): s sampled query rows against all n keys. Rows are sampled only by position, so that
early rows (few keys, peaked) and late ones are represented alike.
"""

from __future__ import annotations

import torch
from torch import Tensor


def stratified_rows(length: int, count: int, generator: torch.Generator) -> Tensor:
    """Returns `[min(count, length)]` sorted positions, one drawn from each of `count` >= 1 equal strata."""
    if count < 1:
        raise ValueError(f"count is {count}, expected at least 1 row")
    if count >= length:
        return torch.arange(length, device="cpu")
    edges = torch.linspace(0, length, count + 1, dtype=torch.float64, device="cpu")
    offset = torch.rand(count, generator=generator, dtype=torch.float64, device="cpu")
    rows = (edges[:-1] + offset * (edges[1:] - edges[:-1])).floor().long()
    return rows.clamp_(max=length - 1)


def grouped_logits(query: Tensor, key: Tensor, scaling: float, softcap: float | None = None) -> Tensor:
    """Returns `scaling * query @ key^T` as `[batch, heads, q_len, kv_len]`, keys shared inside each group of heads.

    Queries are `[batch, heads, q_len, head_dim]`, keys `[batch, num_kv_heads, kv_len, head_dim]`. With a softcap `c`
    logits become `c * tanh(logit / c)`.
    """
    batch, heads, rows, width = query.shape
    groups = key.shape[1]
    folded = query.reshape(batch, groups, heads // groups * rows, width)
    logits = (folded @ key.transpose(-1, -2) * scaling).view(batch, heads, rows, key.shape[2])
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def probabilities(logits: Tensor) -> Tensor:
    """Returns softmax over the last axis, a row of zeros where every logit is minus infinity."""
    return torch.nan_to_num(torch.softmax(logits, dim=-1), nan=0.0)
