"""Packs a padded batch into one row of real tokens and pads it again, and the keys of its cache likewise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer


class PackedLayout:
    """Maps the real tokens of `[batch, length]`, row after row, to one packed row `[1, tokens]`, and back.

    Attributes:
        batch, length: Shape of the padded form.
        lengths: Number of real tokens in each row.
        starts: Column of the first real token of each row, `length` where a row has none.
        index: `[tokens]` gather indices of the real tokens in the flattened padded form.
        cu_seq_lens: `[batch + 1]` int32, cumulative sums of `lengths` from 0.
        tokens: Number of real tokens.
        full: Whether there is no padding.
        contiguous: Whether no row has padding between real tokens.
    """

    def __init__(self, mask: Tensor) -> None:
        """The layout for a padding mask `[batch, length]`, true for real tokens; copies it to the host."""
        real = mask.detach().bool().cpu()
        self.batch, self.length = real.shape
        counts, ones = real.sum(dim=1), real.int()
        first = torch.where(real.any(1), ones.argmax(1), self.length)
        last = self.length - 1 - ones.flip(1).argmax(1)
        self.lengths: tuple[int, ...] = tuple(counts.tolist())
        self.starts: tuple[int, ...] = tuple(first.tolist())
        self.index = real.flatten().nonzero().flatten().to(mask.device)
        self.tokens = len(self.index)
        self.full = self.tokens == self.batch * self.length
        self.cu_seq_lens = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int().to(mask.device)
        self.contiguous = bool(((last - first + 1 == counts) | (counts == 0)).all())

    def pack(self, padded: Tensor) -> Tensor:
        """`[batch, length, ...]` to `[1, tokens, ...]`."""
        return padded.flatten(0, 1).index_select(0, self.index.to(padded.device))[None]

    def pad(self, packed: Tensor) -> Tensor:
        """`[1, tokens, ...]` to `[batch, length, ...]`; padding is zero."""
        flat = packed.new_zeros((self.batch * self.length, *packed.shape[2:]))
        flat = flat.index_copy_(0, self.index.to(packed.device), packed[0])
        return flat.view(self.batch, self.length, *packed.shape[2:])


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
            keys, values = (self.layout.pad(new.transpose(1, 2)).transpose(1, 2) for new in (key_states, value_states))
            self.target.update(keys, values, layer_idx, *args, **kwargs)
            layer: Any = self.target.layers[layer_idx]
            if getattr(layer, "spans", None):  # streaming heads need to know where each row begins
                layer.read(self.layout.starts)
        return key_states, value_states
