"""Statistics that tests compare by."""

import torch
from torch import Tensor


def sqnr(reference: Tensor, approximation: Tensor) -> float:
    signal = reference.double().square().sum()
    noise = (reference.double() - approximation.double()).square().sum()
    return float("inf") if float(noise) == 0.0 else float(10.0 * torch.log10(signal / noise))


def causal_visible(rows: Tensor, kv_len: int, q_offset: int = 0, window: int | None = None, sinks: int = 0) -> Tensor:
    """`[rows, kv_len]`: keys that causal attention shows to queries at `rows`, counted behind `q_offset` keys."""
    position = (rows + q_offset)[:, None]
    keys = torch.arange(kv_len, device=rows.device)[None]
    visible = keys <= position
    if window is not None:
        visible &= (keys > position - window) | (keys < sinks)
    return visible
