"""Transformers' dynamic cache on storage that grows in place.

`DynamicCache` concatenates: every token generated moves the whole past of every layer. `GrowingCache` writes
behind the past. What the layers hand to attention is the same, value for value.

    model.generate(**inputs, past_key_values=adaattn_hf.GrowingCache(config=model.config))

or once for a model: `adaattn_hf.prepare(model)`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from .growing import GROWTH, GrowingTensor, check_room

__all__ = [
    "GrowingCache",
    "GrowingLayer",
    "GrowingSlidingLayer",
    "after_copies",
    "grow_in_place",
    "holds_tokens",
    "negative",
    "room_for",
    "same_rows",
]


class _InPlace:
    """What full and sliding layers share: `keys` and `values` are windows on growing storage."""

    keys: Any
    values: Any
    is_initialized: bool
    device: torch.device
    reserve: int = 0
    growth: float = GROWTH

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make room for tokens shaped like these."""
        super().lazy_initialization(key_states, value_states)  # type: ignore[misc]
        self._key_store: GrowingTensor | None = None
        self._value_store: GrowingTensor | None = None

    def _append(self, key_states: Tensor, value_states: Tensor) -> None:
        """Append in place.

        While autograd records, concatenate: it forbids writing into tensors that it saved.
        """
        if torch.is_grad_enabled():
            past_keys, past_values = self._past(key_states, value_states)
            self.keys = torch.cat([past_keys, key_states], dim=2)
            self.values = torch.cat([past_values, value_states], dim=2)
            self._key_store = self._value_store = None
            return
        if self._key_store is None or self._value_store is None:
            self._restart(*self._past(key_states, value_states))
        assert self._key_store is not None
        assert self._value_store is not None
        self.keys, self.values = self._key_store.append(key_states), self._value_store.append(value_states)

    def _restart(self, keys: Tensor, values: Tensor) -> None:
        """New storage that holds these tokens."""
        self._key_store = GrowingTensor(keys, reserve=self.reserve, growth=self.growth)
        self._value_store = GrowingTensor(values, reserve=self.reserve, growth=self.growth)
        if keys.shape[2]:
            self._key_store.append(keys)
            self._value_store.append(values)

    def _past(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        if self.keys is None or self.values is None or self.keys.numel() == 0:
            return key_states[:, :, :0], value_states[:, :, :0]
        return self.keys, self.values

    def _look(self) -> None:
        """Point `keys` and `values` at what the storage holds now."""
        if self._key_store is not None and self._value_store is not None:
            self.keys, self.values = self._key_store.view(), self._value_store.view()

    def _stores(self) -> tuple[GrowingTensor, ...]:
        if not self.is_initialized or self._key_store is None or self._value_store is None:
            return ()
        return self._key_store, self._value_store

    def offload(self) -> None:
        """Move the tokens to the CPU."""
        self._move("cpu")

    def prefetch(self) -> None:
        """Move the tokens back to the device of the layer."""
        if self.is_initialized:
            after_copies(self.device)
            self._move(self.device)

    def _move(self, device: torch.device | str) -> None:
        stores = self._stores()
        for store in stores:
            store.to(device)
        if not stores and self.is_initialized and self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys.to(device), self.values.to(device)
        self._look()

    def reset(self) -> None:
        """Forget all tokens. (Up to Transformers 5.17 stock layers keep their length and zero it.)"""
        self._key_store = self._value_store = None
        self.keys = self.values = None
        self.is_initialized = False
        super().reset()  # type: ignore[misc]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make each batch row what row `beam_idx` was (beam search); rows that stay are not copied."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows of the batch."""
        stores = self._stores()
        for store in stores:
            store.select(indices)
        if not stores and self.keys is not None and self.values is not None and self.keys.numel() > 0:
            self.keys, self.values = (
                self.keys[indices.to(self.keys.device)],
                self.values[indices.to(self.values.device)],
            )
        self._look()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch."""
        stores = self._stores()
        for store in stores:
            store.repeat(repeats)
        if not stores and self.keys is not None and self.values is not None and self.keys.numel() > 0:
            self.keys = self.keys.repeat_interleave(repeats, dim=0)
            self.values = self.values.repeat_interleave(repeats, dim=0)
        self._look()


class GrowingLayer(_InPlace, DynamicLayer):
    """A layer of full attention: keeps everything, in place."""

    def __init__(self, reserve: int = 0, growth: float = GROWTH, max_cache_len: int | None = None) -> None:
        """`reserve` tokens of room at once, then `growth` times the length, `max_cache_len` at once and no more."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.growth, self.limit = growth, max_cache_len
        self.reserve = reserve if max_cache_len is None else max_cache_len

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append `[batch, heads, n, head_dim]` and return all keys and values."""
        room_for(self.limit, self.get_seq_length() + key_states.shape[2])
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._append(key_states, value_states)
        return self.keys, self.values

    def get_max_length(self) -> int:
        """`max_cache_len`, -1 where the layer grows."""
        return -1 if self.limit is None else self.limit

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens; the count is negative, as in Transformers."""
        negative(tokens_to_remove)
        stores = self._stores()
        if not stores:
            super().crop(tokens_to_remove)
            return
        for store in stores:
            store.crop(-tokens_to_remove)
        self._look()


class GrowingSlidingLayer(_InPlace, DynamicSlidingWindowLayer):
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
            self._look()
            return keys, values
        self._append(key_states, value_states)
        keys, values = self.keys, self.values
        if self.record_past:
            visible = self.sliding_window - 1 + count
            return keys[:, :, -visible:], values[:, :, -visible:]
        self._keep_window()
        return keys, values

    def _keep_window(self) -> None:
        stores = self._stores()
        for store in stores:
            store.drop_front(self.sliding_window - 1)
        if not stores:
            self.keys = self.keys[:, :, -self.sliding_window + 1 :]
            self.values = self.values[:, :, -self.sliding_window + 1 :]
        self._look()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens, and those before the window.

        Raises:
            RuntimeError: The window has been passed and the past was not recorded.
        """
        negative(tokens_to_remove)
        passed = self.get_seq_length() >= self.sliding_window
        if passed and not self.record_past:
            raise RuntimeError(
                f"crop: the window of {self.sliding_window} tokens is passed, what lies before is gone; "
                "call activate_past_recording() before the tokens that may have to be taken back"
            )
        if not self.is_initialized:
            return
        stores = self._stores()
        if not stores and tokens_to_remove:
            self.keys, self.values = self.keys[:, :, :tokens_to_remove], self.values[:, :, :tokens_to_remove]
        for store in stores:
            store.crop(-tokens_to_remove)
        self._look()
        if passed:
            self._keep_window()
            self.cumulative_length += tokens_to_remove
        elif tokens_to_remove:
            self.cumulative_length = self.keys.shape[2]


def _growing(layer: Any, reserve: int, growth: float, max_cache_len: int | None) -> Any:
    """The growing layer that does an empty stock layer's work; any other kind of layer stays what it is."""
    if type(layer) is DynamicLayer:
        return GrowingLayer(reserve, growth, max_cache_len)
    if type(layer) is DynamicSlidingWindowLayer:
        grown = GrowingSlidingLayer(layer.sliding_window, growth)
        grown.record_past = layer.record_past
        return grown
    return layer


class GrowingCache(DynamicCache):
    """`DynamicCache` without concatenation: same methods, same values, same tokens.

    Layers of other kinds than full, sliding or chunked attention (recurrent states, indexers) are stock ones.
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
    if holds_tokens(cache):
        raise ValueError(
            f"cache: this {type(cache).__name__} holds tokens already; change its layers before the first update"
        )
    cache.layers = [_growing(layer, reserve, growth, max_cache_len) for layer in cache.layers]
    if cache.layer_class_to_replicate is DynamicLayer:
        made = functools.partial(GrowingLayer, reserve, growth, max_cache_len)
        cache.layer_class_to_replicate = cast(Any, made)
    return cache


def holds_tokens(cache: Cache) -> bool:
    """Some layer of full or sliding attention has been updated."""
    kinds = (DynamicLayer, DynamicSlidingWindowLayer)
    return any(layer.is_initialized for layer in cache.layers if isinstance(layer, kinds))


def negative(tokens_to_remove: int) -> None:
    """Refuse a count of tokens to take off that is not minus that count, as Transformers does."""
    if tokens_to_remove > 0:
        raise ValueError(
            f"tokens_to_remove: got {tokens_to_remove}, expected 0 or less: "
            "minus the count of tokens to take off the end"
        )


def room_for(limit: int | None, length: int) -> None:
    """Refuse more tokens than `max_cache_len` says."""
    if limit is not None and length > limit:
        raise ValueError(
            f"max_cache_len: got {limit}, expected at least {length}, the tokens to be kept; "
            "make the cache longer, or leave max_cache_len out and it grows"
        )


def same_rows(held: int, key_states: Tensor) -> None:
    """Refuse tokens of another number of sequences than the cache holds."""
    if key_states.shape[0] != held:
        raise ValueError(
            f"past_key_values: got tokens of {key_states.shape[0]} sequences for a cache that holds {held}; begin a "
            "new cache, or call batch_repeat_interleave or batch_select_indices on this one"
        )


def after_copies(device: torch.device) -> None:
    """Let what the current stream does next begin behind the default one: copies of offloaded tokens come from there.

    Transformers waits in its own `update` from 5.20 on; before, it fetches what may still be on its way to the host.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(torch.cuda.default_stream(device))
