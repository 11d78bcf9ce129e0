"""What a plan leaves out, measured by the kernels themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from . import call
from .call import Rules

__all__ = ["dropped_mass"]


def dropped_mass(
    query: Tensor, key: Tensor, lse: Tensor, scaling: float, rules: Rules, *, level: int | None = None
) -> Tensor:
    """Attention weight that a restricted call left out, `[batch, heads, q_len]`: `1 - exp(lse - lse_full)`.

    Exact for any restriction (the weights that are kept sum to exactly that share). Costs one pass over the scores,
    without values. Rows that see nothing even in full lose nothing.

    Args:
        query: `[batch, heads, q_len, head_dim]`.
        key: `[batch, num_kv_heads, kv_len, head_dim]`.
        lse: Of the restricted call, in nats.
        scaling: Factor on the scores.
        rules: What is visible without the restriction.
        level: Number of an instruction set, for tests.
    """
    _, full = call.forward(query, key, key, scaling, rules, need_lse=True, need_out=False, level=level)
    assert full is not None
    lost = -torch.expm1(lse - full)
    return torch.where(torch.isinf(full), torch.zeros_like(lost), lost).clamp_(0.0, 1.0)
