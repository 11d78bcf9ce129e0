"""Statistics that tests compare by."""

import torch
from torch import Tensor


def sqnr(reference: Tensor, approximation: Tensor) -> float:
    signal = reference.double().square().sum()
    noise = (reference.double() - approximation.double()).square().sum()
    if float(noise) == 0.0:
        return float("inf")
    return float(10.0 * torch.log10(signal / noise))


def causal_visible(rows: Tensor, kv_len: int, q_offset: int = 0, window: int | None = None, sinks: int = 0) -> Tensor:
    """Returns the boolean `[rows, kv_len]` visibility of causal attention, True where a row may attend.

    Args:
        rows: `[rows]` query positions, counted from the first query.
        kv_len: Number of keys.
        q_offset: Position of the first query among the keys.
        window: Keys kept before the query, the query itself counted; `None` keeps all.
        sinks: First keys that stay visible beyond the window.
    """
    position = (rows + q_offset)[:, None]
    keys = torch.arange(kv_len, device=rows.device)[None]
    visible = keys <= position
    if window is not None:
        visible &= (keys > position - window) | (keys < sinks)
    return visible
