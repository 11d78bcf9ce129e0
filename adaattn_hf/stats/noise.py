"""Quantisation noise: what int8 and bf16 operands do to logits and outputs.

Symmetric int8 with one scale per token: the scale is a function of that token alone, so rounding never looks
at another token. Keys are smoothed by a fixed vector first; subtracting any vector from all keys shifts each
row of logits by a constant and leaves softmax exactly unchanged, while it removes the offset that would waste
the range.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEVELS = 127.0


def quantise(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Returns int8 `tensor / scale` rounded to nearest and the scales `[…, 1]`, one per vector of the last axis.

    A vector of zeros has scale 1 and quantises to zeros.
    """
    peak = tensor.abs().amax(dim=-1, keepdim=True)
    scale = torch.where(peak > 0, peak / LEVELS, torch.ones_like(peak))
    return torch.round(tensor / scale).clamp_(-LEVELS, LEVELS).to(torch.int8), scale


def through_int8(tensor: Tensor) -> Tensor:
    """Returns the tensor after quantising to int8 per token and back, in its own dtype."""
    codes, scale = quantise(tensor)
    return codes.to(tensor.dtype) * scale


def through_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the tensor after rounding to `dtype` and back."""
    return tensor.to(dtype).to(tensor.dtype)


def logit_noise_variance(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """Returns the predicted variance of the int8 logit noise `[…, q_len, kv_len]` of already smoothed keys.

    Rounding errors are uniform: variance scale^2 / 12 per entry, so sigma^2 = scaling^2 (s_q^2 |k|^2 + s_k^2
    |q|^2) / 12.
    """
    query_step = quantise(query)[1].square()
    key_step = quantise(key)[1].square()
    query_norm = query.square().sum(-1, keepdim=True)
    key_norm = key.square().sum(-1, keepdim=True)
    return scaling**2 * (query_step * key_norm.mT + query_norm * key_step.mT) / 12.0


def output_noise(weights: Tensor, value: Tensor, output: Tensor, variance: Tensor | float) -> Tensor:
    """Returns the predicted mean squared output error of independent logit noise, `[…, q_len]`.

    First order: `E ||o' - o||^2 = sum_j sigma_j^2 p_j^2 ||v_j - o||^2`.

    Args:
        weights: `[…, q_len, kv_len]` attention weights.
        value: `[…, kv_len, head_dim]`.
        output: `[…, q_len, head_dim]`.
        variance: Logit noise variance, a number or `[…, q_len, kv_len]`.
    """
    distance = torch.cdist(output, value).square()
    return (weights.square() * distance * variance).sum(-1)


def sqnr(reference: Tensor, approximation: Tensor) -> float:
    """Returns the signal-to-quantisation-noise ratio in dB; infinite when both are equal."""
    signal = reference.double().square().sum()
    noise = (reference.double() - approximation.double()).square().sum()
    if float(noise) == 0.0:
        return float("inf")
    return float(10.0 * torch.log10(signal / noise))


def crest_factor(tensor: Tensor) -> Tensor:
    """Returns largest magnitude over root mean square per channel, `[…, head_dim]`, over the positions.

    A channel with a large crest factor (or a large mean) wastes the int8 range of its token; see `quantise`.
    """
    return tensor.abs().amax(-2) / tensor.square().mean(-2).sqrt().clamp(min=1e-30)
