"""Transformers' dynamic cache on storage that grows in place.

`DynamicCache` concatenates: every token generated moves the whole past of every layer. `GrowingCache` writes
behind the past. What the layers hand to attention is the same, value for value.

    model.generate(**inputs, past_key_values=adaattn_hf.GrowingCache(config=model.config))

or once for a model: `adaattn_hf.prepare(model)`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from .growing import GROWTH, GrowingTensor, check_room
from .kept import KeptTokens, Whole, Windowed, replace_layers, room_for, same_rows


class _InPlace(KeptTokens):
    """What full and sliding layers share: `keys` and `values` are views of storage that grows in place.

    What somebody else assigns to `keys` and `values` is what the layer holds from then on, as in Transformers' own.
    """

    reserve: int = 0
    growth: float = GROWTH

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make room for tokens shaped like these."""
        super().lazy_initialization(key_states, value_states)  # type: ignore[misc]
        self._stores: tuple[GrowingTensor, ...] = ()
        self._shown: tuple[Any, Any] = (None, None)

    def _append(self, key_states: Tensor, value_states: Tensor) -> None:
        """Append in place; while autograd records, concatenate, since it forbids writing into tensors that it saved."""
        if torch.is_grad_enabled():
            past_keys, past_values = self._past(key_states, value_states)
            self.keys = torch.cat([past_keys, key_states], dim=2)
            self.values = torch.cat([past_values, value_states], dim=2)
            return
        stores = self.kept() or self._restart(*self._past(key_states, value_states))
        same_rows(stores[0].batch, key_states)
        self._show(stores[0].append(key_states), stores[1].append(value_states))

    def _restart(self, keys: Tensor, values: Tensor) -> tuple[GrowingTensor, ...]:
        """New storage that holds these tokens."""
        self._stores = tuple(
            GrowingTensor(held, reserve=self.reserve, growth=self.growth) for held in (keys, values)
        )
        for store, held in zip(self._stores, (keys, values), strict=True):
            if held.shape[2]:
                store.append(held)
        return self._stores

    def _past(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        if self.keys is None or self.values is None or self.keys.numel() == 0:
            return key_states[:, :, :0], value_states[:, :, :0]
        return self.keys, self.values

    def _show(self, keys: Tensor, values: Tensor) -> None:
        self._shown = self.keys, self.values = keys, values

    def look(self) -> None:
        """Point `keys` and `values` at what the storage holds now."""
        if self.is_initialized and self._stores:
            self._show(*(store.view() for store in self._stores))

    def let_go(self) -> None:
        """Hold no views of the storage."""
        self.keys, self.values = self._shown = None, None

    def kept(self) -> tuple[GrowingTensor, ...]:
        """The storage of keys and of values; none where they are plain tensors."""
        if not self.is_initialized:
            return ()
        if self._stores and not (self.keys is self._shown[0] and self.values is self._shown[1]):
            self._stores = ()
        return self._stores

    def change(self, store: Callable[[Any], None], tensor: Callable[[Tensor], Tensor]) -> None:
        """Change all tokens, also those that were concatenated while autograd recorded."""
        super().change(store, tensor)
        if not self.kept() and self.keys is not None and self.keys.numel() > 0:
            self.keys, self.values = tensor(self.keys), tensor(self.values)

    def reset(self) -> None:
        """Forget all tokens. (Stock layers up to Transformers 5.17 keep their length and set the tokens to zero.)"""
        self._stores = ()
        self.let_go()
        self.is_initialized = False
        super().reset()  # type: ignore[misc]


class GrowingLayer(_InPlace, Whole, DynamicLayer):
    """A layer of full attention: keeps everything, in place."""

    def __init__(self, reserve: int = 0, growth: float = GROWTH, max_cache_len: int | None = None) -> None:
        """See `Whole.set_room`."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.set_room(reserve, growth, max_cache_len)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append `[batch, heads, n, head_dim]` and return all keys and values."""
        room_for(self.limit, self.get_seq_length() + key_states.shape[2])
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._append(key_states, value_states)
        return self.keys, self.values


class GrowingSlidingLayer(_InPlace, Windowed, DynamicSlidingWindowLayer):
    """A layer of sliding or chunked attention: keeps the window, in place."""

    def __init__(self, sliding_window: int, growth: float = GROWTH) -> None:
        """Keeps the last `sliding_window - 1` tokens."""
        super().__init__(sliding_window=sliding_window)
        self.growth = growth

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append `[batch, heads, n, head_dim]` and return the keys and values that the queries can see."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        count = key_states.shape[2]
        self.cumulative_length += count
        if count >= self.sliding_window and not self.record_past and not torch.is_grad_enabled():
            # a prompt longer than the window is used once; only the window's worth of it is worth room
            past_keys, past_values = self._past(key_states, value_states)
            keys = torch.cat([past_keys, key_states], dim=2) if past_keys.shape[2] else key_states
            values = torch.cat([past_values, value_states], dim=2) if past_values.shape[2] else value_states
            self._restart(keys[:, :, -self.sliding_window + 1 :], values[:, :, -self.sliding_window + 1 :])
            self.look()
            return keys, values
        self._append(key_states, value_states)
        keys, values = self.keys, self.values
        if self.record_past:
            visible = self.sliding_window - 1 + count
            return keys[:, :, -visible:], values[:, :, -visible:]
        self.keep_window()
        return keys, values

    def keep_window(self) -> None:
        """Forget what lies before the window."""
        stores = self.kept()
        for store in stores:
            store.drop_front(self.sliding_window - 1)
        if not stores:
            self.keys = self.keys[:, :, -self.sliding_window + 1 :]
            self.values = self.values[:, :, -self.sliding_window + 1 :]
        self.look()


class GrowingCache(DynamicCache):
    """`DynamicCache` without concatenation: same methods, same keys and values.

    Layers other than those of full, sliding or chunked attention (recurrent states, indexers) stay Transformers' own.
    """

    def __init__(
        self,
        ddp_cache_data: Iterable[tuple[Tensor | None, ...]] | None = None,
        config: Any = None,
        reserve: int = 0,
        growth: float = GROWTH,
        offloading: bool = False,
        offload_only_non_sliding: bool = False,
    ) -> None:
        """An empty cache, or one filled with keys and values.

        Args:
            ddp_cache_data: Per layer keys, values and, where it slides, the window, as iterating over a cache
                gives them; how `torch.nn.DataParallel` puts caches together.
            config: Of the model; tells which layers slide. Without it all layers keep everything.
            reserve: Tokens for which room is made at once in layers that keep everything, e.g. prompt plus
                `max_new_tokens`: then nothing ever moves.
            growth: Factor on the length when room is made. 1.25 wastes at most a quarter.
            offloading, offload_only_non_sliding: As in `DynamicCache`.

        Raises:
            ValueError: `growth` is not larger than 1, or `reserve` is negative.
        """
        super().__init__(
            config=config, offloading=offloading, offload_only_non_sliding=offload_only_non_sliding
        )
        grow_in_place(self, reserve=reserve, growth=growth)
        for index, (keys, values, *window) in enumerate(ddp_cache_data or ()):
            if config is None:
                sliding = window[0] if window else None
                self.layers.append(
                    GrowingLayer(reserve, growth)
                    if sliding is None
                    else GrowingSlidingLayer(int(sliding), growth)
                )
            if keys is not None and values is not None:
                layer: Any = self.layers[index]
                layer.update(keys, values)


def grow_in_place(
    cache: Cache, *, reserve: int = 0, growth: float = GROWTH, max_cache_len: int | None = None
) -> Cache:
    """Give a `DynamicCache` that is still empty layers that grow in place; returns the cache.

    Raises:
        ValueError: The cache holds tokens already, or `growth`, `reserve` or `max_cache_len` makes no room.
    """
    check_room(reserve, growth, max_cache_len)
    return replace_layers(
        cache,
        functools.partial(GrowingLayer, reserve, growth, max_cache_len),
        lambda window: GrowingSlidingLayer(window, growth),
        lambda layer: layer,
    )
