"""The one dtype that a call computes in, and the dtype of what it answers: autocast's where that is on."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["one_dtype", "restored"]


def restored(out: Tensor, dtype: torch.dtype) -> Tensor:
    """Autocast defines the output's dtype, as it does for stock attention; nothing else may change it."""
    return out if _autocasts(out.device.type) else out.to(dtype)


def _autocasts(device: str) -> bool:
    """Whether autocast is on; the meta device, on which `explain` runs models, has none."""
    return device != "meta" and torch.is_autocast_enabled(device)


def one_dtype(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value in one dtype: autocast's where it is on, else the widest that came.

    Rotary embeddings leave queries and keys in fp32 under autocast while values are half; GPT-2 may ask for fp32.
    """
    dtype = query.dtype
    # GPT-2's setting; asked of the instance's dictionary because `Module.__getattr__` is slow to miss
    upcasts = module.__dict__.get("reorder_and_upcast_attn")
    casts = torch._C._is_any_autocast_enabled() and _autocasts(query.device.type)
    if not (casts or upcasts) and dtype is key.dtype is value.dtype:
        return query, key, value
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not tensor.dtype.is_floating_point:
            raise ValueError(
                f"{name}: got {tensor.dtype}, expected a floating-point dtype; cast it with .float()"
            )
    if casts:
        dtype = torch.get_autocast_dtype(query.device.type)
    else:
        dtype = torch.promote_types(torch.promote_types(dtype, key.dtype), value.dtype)
    if upcasts:
        dtype = torch.promote_types(dtype, torch.float32)
    return query.to(dtype), key.to(dtype), value.to(dtype)
