"""Refuses masks, biases, scaling factors and function transforms that attention cannot handle, before using them."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
from torch import Tensor

from adaattn_hf.backends.select import BackendRefusal


def check_scaling(scaling: Any) -> None:
    """Refuse a scaling factor that is not a number.

    Raises:
        ValueError: It is not; the message says what it should be.
    """
    if not isinstance(scaling, (Real, Tensor, torch.SymFloat, torch.SymInt)):
        raise ValueError(f"scaling: got {scaling!r:.80}, expected a number, or None for head_dim**-0.5")


def check_additions(query: Tensor, attention_mask: Any, position_bias: Any) -> None:
    """Refuse a mask or a bias of the wrong type, shape or device.

    Raises:
        ValueError: The message names it, what it is and what it should be.
    """
    if isinstance(attention_mask, Tensor):
        _check_mask(query, attention_mask)
    if position_bias is None:
        return
    known = isinstance(position_bias, Tensor) and position_bias.is_floating_point()
    if not known or position_bias.dim() < 2:
        raise ValueError(
            f"position_bias: got {position_bias!r:.80}, expected a floating-point tensor that broadcasts to "
            "[batch, heads, q_len, kv_len]"
        )


def _check_mask(query: Tensor, mask: Tensor) -> None:
    if mask.device != query.device:
        raise ValueError(
            f"attention_mask: got a tensor on {mask.device} for queries on {query.device}; move it there"
        )
    if mask.layout != torch.strided or mask.dtype.is_complex or mask.ndim < 2:
        raise ValueError(
            f"attention_mask: got shape {tuple(mask.shape)}, {mask.dtype}, {mask.layout}, expected a dense tensor "
            "[batch, 1 or heads, q_len, kv_len] or [batch, kv_len] of booleans or numbers"
        )
    if mask.ndim == 4 and mask.dtype is not torch.bool and not mask.dtype.is_floating_point:
        # could be zeros and ones, or numbers to add
        raise ValueError(
            f"attention_mask: got {mask.dtype} with four dimensions, expected bool (True = attend) or floating point "
            "(added to the scores); say which with attention_mask.bool() or .float()"
        )


def with_bias(mask: Tensor, bias: Tensor, query: Tensor, kv_len: int) -> Tensor:
    """Returns the sum of an additive mask and a bias, at least in the query's precision.

    Raises:
        ValueError: The bias does not broadcast to the scores.
    """
    extents = (*query.shape[:3], kv_len)
    if bias.dim() > 4 or any(
        size not in (1, extent) for size, extent in zip(bias.shape[::-1], extents[::-1], strict=False)
    ):
        raise ValueError(
            f"position_bias: got shape {tuple(bias.shape)}, expected one that broadcasts to {extents}, which is "
            "[batch, heads, q_len, kv_len]"
        )
    return mask.to(torch.promote_types(mask.dtype, query.dtype)) + bias


def check_transform(backend: str | None, transform: str, query: Tensor, key: Tensor) -> None:
    """Refuses calls under a function transform that cannot be computed by torch's own operations.

    A transform (`torch.func`, `make_fx`) sees torch operations, but nothing of the native kernels.

    Raises:
        BackendRefusal: The native backend is forced, or lengths are symbolic.
    """
    if backend is not None:
        raise BackendRefusal(
            f"backend {backend!r} cannot serve this call: {transform} sees nothing of what its kernels compute. Use "
            "attn_implementation='adaattn', which then computes by torch's own operations, or torch.export."
        )
    if any(isinstance(size, torch.SymInt) for size in (*query.shape, *key.shape)):
        raise BackendRefusal(
            f"{transform}: got lengths that are symbols, expected integers, which attention's rules are made of; trace "
            "with tracing_mode='real' or 'fake', or use torch.export with dynamic_shapes"
        )
