"""Seconds of the attention calls of a forward pass on a CUDA device: stock, exact and under plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.listeners import tapping
from adaattn_hf.eval.arms import exact_tap
from adaattn_hf.plans.bound_layer import BoundLayer
from adaattn_hf.plans.execute import attend
from adaattn_hf.stats.stopwatch import on_device, quartiles


@torch.no_grad()
def attention_seconds(
    forward: Callable[[], object], arms: Mapping[str, Mapping[int, BoundLayer | None]]
) -> dict[str, float]:
    """Returns seconds of all attention calls of one forward pass: stock sdpa's, the exact ones, each arm's.

    Args:
        forward: The pass, which goes on with exact attention.
        arms: Programs by layer, by name; a layer without one is exact.
    """
    stock = AttentionInterface()["sdpa"]
    total = dict.fromkeys(("stock sdpa", "exact", *arms), 0.0)

    def tap(module: nn.Module, call: AttentionCall) -> Tensor:
        index = int(module.layer_idx)  # type: ignore[arg-type]
        tensors = (call.query, call.key, call.value)
        calls: dict[str, Callable[[], object]] = {
            "stock sdpa": partial(stock, module, *tensors, None, scaling=call.scaling, is_causal=True),
            "exact": partial(exact_tap, module, call),
        }
        for name, bound_layers in arms.items():
            bound_layer = bound_layers.get(index)
            calls[name] = calls["exact"] if bound_layer is None else partial(attend, bound_layer, call)
        for name, runs in on_device(calls, host=False).items():
            total[name] += quartiles(runs)[1]
        return exact_tap(module, call)

    with tapping(tap):
        forward()
    return total
