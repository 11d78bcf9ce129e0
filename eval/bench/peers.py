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
    # only where kernels is installed
    from transformers.integrations.hub_kernels import get_attn_kernel_version

    repository = "kernels-community/flash-attn2"
    return _flash(package.get_kernel(repository, version=get_attn_kernel_version(repository)), cell)


PEERS: dict[str, tuple[str, Callable[[Any, Cell], Callable[..., Tensor]], bool, bool]] = {
    "xformers": ("xformers.ops.fmha", _xformers, False, True),
    "flash_attn": ("flash_attn", _flash, True, True),
    "sageattention": ("sageattention", _sage, False, False),
    "kernels": ("kernels", _hub, True, True),
}
"""Name -> module, what makes a call of it, whether it takes windows, whether its causal mask ends at the last key."""

_UNABLE = (AssertionError, AttributeError, TypeError)
"""How peers say that they cannot do a cell, besides the errors that every implementation may raise."""


def _words(error: Exception) -> str:
    """An error in words, an assertion without any among them."""
    return str(error) or type(error).__name__


def absent_peers(names: Sequence[str]) -> dict[str, str]:
    """Why peers of a grid are not measured, by name: they are not installed, or nobody knows how to call them."""
    found = {}
    for name in names:
        if importlib.util.find_spec(name) is None:
            found[name] = "absent"
        elif name not in PEERS:
            found[name] = "installed; no way to call it is known"
    return found


def refusal(name: str, cell: Cell) -> str | None:
    """Why a peer is not asked for a cell, None where it is: for dense attention, with a window where it has one."""
    _, _, windows, bottom = PEERS[name]
    if cell.level != "attention":
        return "no model runs it by a name"
    if cell.padding or cell.packed or cell.chunk or cell.filled is not None:
        return "asked for dense attention alone"
    if cell.window is not None and not windows:
        return "takes no window"
    if cell.mask == "causal" and 1 < cell.q_len < cell.keys and not bottom:
        return "its causal mask begins at the first key"
    return None


def peer_work(name: str, cell: Cell, query: Tensor, key: Tensor, value: Tensor) -> Callable[[], Any]:
    """What a peer does of a cell that it takes: the same attention calls on the same numbers, no mask to make.

    Raises:
        RuntimeError: It asserts what the cell is not, or this version of it lacks what is called here.
    """
    module, adapt, _, _ = PEERS[name]
    try:
        call = adapt(importlib.import_module(module), cell)
    except _UNABLE as error:
        raise RuntimeError(_words(error)) from error
    scaling = cell.head_dim**-0.5

    def work() -> Any:
        out = None
        try:
            with torch.set_grad_enabled(cell.gradient):
                for _ in range(cell.layers):
                    out = call(query, key, value, scaling)
                    if cell.gradient:
                        torch.autograd.grad(out.sum(), (query, key, value))
        except _UNABLE as error:
            raise RuntimeError(_words(error)) from error
        return out

    return work
