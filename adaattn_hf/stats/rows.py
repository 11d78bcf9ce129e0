"""Samples query rows, stratified by position.

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
