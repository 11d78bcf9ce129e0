"""A bound on the output error of any perturbation of the logits, from the perturbation's oscillation alone.

For one row with weights p = softmax(s) and p' = softmax(s + e), and osc = max e - min e over the allowed
keys: ||p - p'||_1 <= 2 tanh(osc / 4) <= osc / 2, and ||o - o'||_2 <= ||p - p'||_1 * max_j ||v_j - c||_2 for
any fixed c. The bound speaks for the data at hand: a rank chosen on calibration text carries it for that text
only.
"""

from __future__ import annotations

import torch
from torch import Tensor


def oscillation(perturbation: Tensor, visible: Tensor | None = None) -> Tensor:
    """Returns max - min of the perturbation over the allowed keys, `[…, q_len]`; 0 where no key is allowed."""
    if visible is None:
        return perturbation.amax(-1) - perturbation.amin(-1)
    high = perturbation.masked_fill(~visible, float("-inf")).amax(-1)
    low = perturbation.masked_fill(~visible, float("inf")).amin(-1)
    return torch.where(visible.expand_as(perturbation).any(-1), high - low, torch.zeros_like(high))


def weight_bound(perturbation: Tensor, visible: Tensor | None = None) -> Tensor:
    """Returns an upper bound of the L1 distance of the attention weights, `[…, q_len]`."""
    return 2.0 * torch.tanh(oscillation(perturbation, visible) / 4.0)


def output_bound(perturbation: Tensor, value: Tensor, visible: Tensor | None = None) -> Tensor:
    """Returns an upper bound of the L2 error of the attention output, `[…, q_len]`.

    Args:
        perturbation: `[…, q_len, kv_len]` change of the logits.
        value: `[…, kv_len, head_dim]`.
        visible: Boolean `[…, q_len, kv_len]`, True = attend.
    """
    if visible is None:
        reach: Tensor = (value - value.mean(-2, keepdim=True)).norm(dim=-1).amax(-1)[..., None]
    else:
        wide = visible.expand_as(perturbation)
        count = wide.sum(-1, keepdim=True).clamp(min=1)
        centre = (wide.to(value.dtype) @ value) / count
        reach = torch.cdist(centre, value).masked_fill(~wide, 0.0).amax(-1)
    bound: Tensor = weight_bound(perturbation, visible) * reach
    return bound


def dropped_mass_bound(kept_lse: Tensor, full_lse: Tensor, value: Tensor) -> Tensor:
    """Returns `delta * diam(V)` with `delta = 1 - exp(kept_lse - full_lse)`: the error bound of dropping keys."""
    dropped = -torch.expm1((kept_lse - full_lse).clamp(max=0.0))
    diameter = torch.cdist(value, value).amax(dim=(-1, -2))
    return dropped * diameter[..., None]
