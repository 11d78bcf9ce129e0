"""Libraries that answer to no name of Transformers, called by their own functions where they are installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .grid import Cell


def _xformers(package: Any, cell: Cell) -> Callable[..., Tensor]:
    masks = package.attn_bias
    causal = masks.LowerTriangularFromBottomRightMask() if cell.mask == "causal" else None
    groups = cell.heads // cell.kv_heads

    def call(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        if groups > 1:  # [batch, length, key heads, group, size], keys without a copy
            q = q.unflatten(2, (cell.kv_heads, groups))
            k, v = (t[:, :, :, None].expand(-1, -1, -1, groups, -1) for t in (k, v))
        out: Tensor = package.memory_efficient_attention(q, k, v, attn_bias=causal, scale=scaling)
        return out.flatten(2, 3) if groups > 1 else out

    return call


def _flash(package: Any, cell: Cell) -> Callable[..., Tensor]:
    def call(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        left = -1 if cell.window is None else cell.window - 1
        window = (left, -1 if left < 0 else 0)
        out: Tensor = package.flash_attn_func(
            q, k, v, softmax_scale=scaling, causal=cell.mask == "causal", window_size=window
        )
        return out

    return call


def _sage(package: Any, cell: Cell) -> Callable[..., Tensor]:
    def call(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        # its causal mask begins at the first key
        causal = cell.mask == "causal" and cell.q_len > 1
        out: Tensor = package.sageattn(
            query, key, value, tensor_layout="HND", is_causal=causal, sm_scale=scaling
        )
        return out.transpose(1, 2)

    return call


def _hub(package: Any, cell: Cell) -> Callable[..., Tensor]:
    return _flash(package.get_kernel("kernels-community/flash-attn2"), cell)


PEERS: dict[str, tuple[str, Callable[[Any, Cell], Callable[..., Tensor]], bool, bool]] = {
    "xformers": ("xformers.ops", _xformers, False, True),
    "flash_attn": ("flash_attn", _flash, True, True),
    "sageattention": ("sageattention", _sage, False, False),
    "kernels": ("kernels", _hub, True, True),
}
"""Name -> module, what makes a call of it, whether it takes windows, whether its causal mask ends at the last key."""


def absent_peers(names: Sequence[str]) -> dict[str, str]:
    """Why peers of a grid are not measured, by name: they are not installed, or nobody knows how to call them."""
    found = {}
    for name in names:
        if importlib.util.find_spec(name) is None:
            found[name] = "absent"
        elif name not in PEERS:
            found[name] = "installed; no way to call it is known"
    return found


def takes(name: str, cell: Cell) -> bool:
    """Whether a peer can be asked for a cell: dense attention, with a window where it has one."""
    _, _, windows, bottom = PEERS[name]
    ragged = cell.padding or cell.packed or cell.chunk or cell.filled is not None
    shifted = cell.mask == "causal" and 1 < cell.q_len < cell.keys and not bottom
    return cell.level == "attention" and not ragged and not shifted and (cell.window is None or windows)


def peer_work(name: str, cell: Cell, query: Tensor, key: Tensor, value: Tensor) -> Callable[[], Any]:
    """What a peer does of a cell that it takes: the same attention calls on the same memory, no mask to make."""
    module, adapt, _, _ = PEERS[name]
    call = adapt(importlib.import_module(module), cell)
    scaling = cell.head_dim**-0.5

    def work() -> Any:
        out = None
        with torch.set_grad_enabled(cell.gradient):
            for _ in range(cell.layers):
                out = call(query, key, value, scaling)
                if cell.gradient:
                    torch.autograd.grad(out.sum(), (query, key, value))
        return out

    return work
