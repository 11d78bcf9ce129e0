"""Rounding of queries, keys and values to int8 with one scale per token, and to narrower floating-point types.

Symmetric int8: a token's scale is its largest magnitude / 127, a function of only that token, so that rounding never
looks at another token.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEVELS = 127.0


def through_int8(tensor: Tensor) -> Tensor:
    """Returns the tensor after rounding to int8 and back, in its own dtype: one scale per vector of the last axis.

    A vector of zeros stays one.
    """
    peak = tensor.abs().amax(dim=-1, keepdim=True)
    scale = torch.where(peak > 0, peak / LEVELS, torch.ones_like(peak))
    codes = torch.round(tensor / scale).clamp_(-LEVELS, LEVELS).to(torch.int8)
    return codes.to(tensor.dtype) * scale


def through_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the tensor after rounding to `dtype` and back."""
    return tensor.to(dtype).to(tensor.dtype)
