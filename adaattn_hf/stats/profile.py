"""Mass-distance profile: how much attention every window would drop, for all windows at once.

Dropping the keys outside a set S and renormalising changes the output by delta * (mean of the dropped values
- mean of the kept values), with delta = 1 - exp(lse_S - lse_all): two log-sum-exps measure the error of any
window. One gathered attention of the sampled rows gives the lse of every distance bin, and so delta of every
window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adaattn_hf.stats.rows import grouped_logits, masked, safe_lse


@dataclass(frozen=True)
class MassProfile:
    """Dropped mass of sink-and-window attention.

    Attributes:
        windows: The windows measured, rising.
        sinks: First keys always kept.
        dropped: `[batch, heads, rows, windows]`, attention weight outside sinks and window.
    """

    windows: tuple[int, ...]
    sinks: int
    dropped: Tensor

    def mean(self) -> Tensor:
        """Returns the mean dropped mass `[heads, windows]` over batch and rows."""
        return self.dropped.mean(dim=(0, 2))

    def quantile(self, share: float) -> Tensor:
        """Returns the `share` quantile `[heads, windows]` of the dropped mass over batch and rows."""
        heads, windows = self.dropped.shape[1], len(self.windows)
        flat = self.dropped.permute(1, 3, 0, 2).reshape(heads, windows, -1)
        return torch.quantile(flat.float(), share, dim=-1)

    def quartiles(self) -> Tensor:
        """Returns `[heads, windows, 4]`: the mean dropped mass in each quarter of the rows, early to late."""
        parts = self.dropped.tensor_split(4, dim=2)
        return torch.stack(
            [
                part.mean(dim=(0, 2)) if part.shape[2] else part.new_zeros(part.shape[1], part.shape[3])
                for part in parts
            ],
            dim=-1,
        )


def mass_profile(
    query: Tensor,
    key: Tensor,
    positions: Tensor,
    *,
    scaling: float,
    windows: Sequence[int],
    sinks: int = 16,
    visible: Tensor | None = None,
    softcap: float | None = None,
    first_keys: Tensor | int = 0,
) -> MassProfile:
    """Returns the dropped mass of each window for the sampled rows.

    Args:
        query: `[batch, heads, rows, head_dim]`, the sampled rows.
        key: `[batch, num_kv_heads, kv_len, head_dim]`.
        positions: `[rows]`, the place of each row among the keys.
        scaling: Factor on the products.
        windows: Windows to measure; a window of W keeps the keys at distance below W.
        sinks: First keys kept beside every window.
        visible: Boolean, broadcastable to `[batch, heads, rows, kv_len]`, True = attend.
        softcap: `c` of `c * tanh(logit / c)`.
        first_keys: Place of the first key of each row's document, `[rows]` or one number; sinks are counted
            from it.
    """
    ordered = tuple(sorted(windows))
    logits = masked(grouped_logits(query, key, scaling, softcap), visible)
    keys = torch.arange(key.shape[2], device=query.device)
    distance = positions[:, None] - keys[None]
    start = first_keys if isinstance(first_keys, Tensor) else torch.as_tensor(first_keys, device=query.device)
    from_start = keys[None] - start.reshape(-1, 1)
    sink = (from_start >= 0) & (from_start < sinks)
    total = safe_lse(logits)
    finite = torch.isfinite(total)
    dropped = []
    for window in ordered:
        kept = safe_lse(masked(logits, (distance < window) | sink))
        ratio = torch.where(finite, kept - total, torch.zeros_like(total)).clamp(max=0.0)
        dropped.append(-torch.expm1(ratio))
    return MassProfile(ordered, sinks, torch.stack(dropped, dim=-1))


def extrapolated_mass(dropped: float, measured_at: int, window: int, length: int) -> float:
    """Returns the dropped mass to expect at `length` if far keys gained odds in proportion to their number.

    odds(n) = odds(n0) * (n - W) / (n0 - W), the pessimistic extrapolation: every further far key is as
    attractive as the far keys already seen. A window that fails it needs a measurement at that length.

    Raises:
        ValueError: If `dropped` is no share in [0, 1), or `measured_at` is not longer than the window.
    """
    if not 0.0 <= dropped < 1.0:
        raise ValueError(f"dropped is {dropped}, expected a share in [0, 1)")
    if measured_at <= window:
        raise ValueError(f"measured_at is {measured_at}, expected a length beyond the window of {window}")
    odds = dropped / (1.0 - dropped) * max(length - window, 0) / (measured_at - window)
    return odds / (1.0 + odds)
