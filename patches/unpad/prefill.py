"""The cache that a packed prompt is read into: attention sees packed tokens, the caller's cache gets padded ones."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from .layout import PackedLayout

__all__ = ["PackedPrefill"]


class PackedPrefill(Cache):
    """Stands in for an empty cache, or for none, during one forward pass over packed tokens.

    To the model it is empty: masks and positions come out as without a cache. Keys and values pass through to
    attention as they are, and into `target` in the padded form, with zeros where padding is, which later
    calls mask. Its presence also keeps Transformers from guessing at documents by gaps in the positions.
    """

    def __init__(self, target: Cache | None, layout: PackedLayout) -> None:
        """`target` is the empty cache that the caller will see, if it sees one."""
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self.target = target
        self.layout = layout

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store `[1, heads, tokens, head_dim]` padded and return it unchanged."""
        if self.target is not None:
            keys, values = self.layout.pad_heads(key_states), self.layout.pad_heads(value_states)
            self.target.update(keys, values, layer_idx, *args, **kwargs)
            layer: Any = self.target.layers[layer_idx]
            if hasattr(layer, "spans"):  # streaming heads keep what attention would have told them about
                layer.read(self.layout.starts)
        return key_states, value_states
