"""Chooses the dtype that a call computes in and the dtype of its output, with and without autocast."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from adaattn_hf.attention.request import check_dtype


def restored(out: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the output in the dtype of the query, under autocast in autocast's, as stock attention does."""
    return out if _autocasts(out.device.type) else out.to(dtype)


def _autocasts(device: str) -> bool:
    """Whether autocast is on for a device; the meta device, which `explain` uses, has no autocast."""
    return device != "meta" and torch.is_autocast_enabled(device)


def one_dtype(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns query, key and value in one dtype: autocast's where it is on, else the widest of the three.

    Under autocast, rotary embeddings return fp32 queries and keys beside half-precision values; GPT-2 can ask for fp32.
    """
    dtype = query.dtype
    # a setting of GPT-2, read from `__dict__` because a failing `Module.__getattr__` is slow
    upcasts = module.__dict__.get("reorder_and_upcast_attn")
    casts = torch._C._is_any_autocast_enabled() and _autocasts(query.device.type)
    if not (casts or upcasts) and dtype is key.dtype is value.dtype:
        return query, key, value
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_dtype(name, tensor)
    if casts:
        dtype = torch.get_autocast_dtype(query.device.type)
    else:
        dtype = torch.promote_types(torch.promote_types(dtype, key.dtype), value.dtype)
    if upcasts:
        dtype = torch.promote_types(dtype, torch.float32)
    return query.to(dtype), key.to(dtype), value.to(dtype)
