"""A cache for packed prefill: attention sees packed keys and values, the caller's cache gets padded ones."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from .layout import PackedLayout


class PackedPrefill(Cache):
    """Replaces an empty cache, or none, during one forward pass over packed tokens.

    To the model it looks empty, so masks and positions are those of a call without a cache. Keys and values go to
    attention unchanged and to `target` padded, with zeros at padding, which later calls mask. That a cache is passed
    also keeps Transformers from inferring packed documents from gaps in the position ids.
    """

    def __init__(self, target: Cache | None, layout: PackedLayout) -> None:
        """`target` is the caller's empty cache, or None where the call returns no cache."""
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self.target = target
        self.layout = layout

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores `[1, heads, tokens, head_dim]` in padded form and returns it unchanged."""
        if self.target is not None:
            keys, values = self.layout.pad_heads(key_states), self.layout.pad_heads(value_states)
            self.target.update(keys, values, layer_idx, *args, **kwargs)
            layer: Any = self.target.layers[layer_idx]
            if getattr(layer, "spans", None):  # streaming heads need to know where each row begins
                layer.read(self.layout.starts)
        return key_states, value_states
