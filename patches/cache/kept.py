"""Shared by all cache layers of this package: moves between devices, selection of batch rows, and refusals."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from .growing import GrowingTensor
from .tokens import Tokens


class KeptTokens(ABC):
    """The part of a cache layer that moves its tokens between devices and chooses rows of the batch.

    A mixin that is named before the layer of Transformers that it changes.
    """

    is_initialized: bool
    device: torch.device
    keys: Any
    values: Any

    @abstractmethod
    def kept(self) -> Sequence[GrowingTensor | Tokens]:
        """The storage that holds the tokens; empty while there are none."""

    @abstractmethod
    def look(self) -> None:
        """Point `keys` and `values` at what the storage holds now."""

    def let_go(self) -> None:
        """Hold no views of the storage, which looks for others that do before it is changed."""
        self.keys = self.values = None

    def __copy__(self) -> Any:
        """A layer of its own, as a shallow copy of a layer that concatenates is: two must not append to one storage."""
        return copy.deepcopy(self)

    def change(self, store: Callable[[Any], None], tensor: Callable[[Tensor], Tensor]) -> None:
        """Change all tokens.

        Args:
            store: Changes one of `kept` in place.
            tensor: Returns the same change of keys or values that are a plain tensor, in layers that have such.
        """
        kept = self.kept()
        if kept:
            self.let_go()
        for one in kept:
            store(one)
        self.look()

    def take_off(self, count: int) -> None:
        """Forget the last `count` tokens."""
        if count:
            self.change(lambda one: one.crop(count), lambda plain: plain[:, :, :-count])

    def offload(self) -> None:
        """Move the tokens to the CPU."""
        self._move("cpu")

    def prefetch(self) -> None:
        """Move the tokens back to the device of the layer."""
        if self.is_initialized:
            after_copies(self.device)
            self._move(self.device)

    def _move(self, device: torch.device | str) -> None:
        self.change(lambda one: one.to(device), lambda tensor: tensor.to(device))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make each batch row what row `beam_idx` was (beam search); rows that stay are not copied."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows of the batch."""
        self.change(lambda one: one.select(indices), lambda tensor: tensor[indices.to(tensor.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch."""
        self.change(lambda one: one.repeat(repeats), lambda tensor: tensor.repeat_interleave(repeats, dim=0))


class Whole(KeptTokens):
    """What layers of full attention share: they keep everything, up to `max_cache_len` tokens."""

    reserve: int
    growth: float
    limit: int | None

    def set_room(self, reserve: int, growth: float, max_cache_len: int | None) -> None:
        """`reserve` tokens of room at once, then `growth` times the length, `max_cache_len` at once and no more."""
        self.growth, self.limit = growth, max_cache_len
        self.reserve = reserve if max_cache_len is None else max_cache_len

    def get_max_length(self) -> int:
        """`max_cache_len`, -1 where the layer grows."""
        return -1 if self.limit is None else self.limit

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens; the count is negative, as in Transformers."""
        negative(tokens_to_remove)
        self.take_off(-tokens_to_remove)


class Windowed(KeptTokens):
    """What layers of sliding or chunked attention share: they keep the window."""

    cumulative_length: int

    @abstractmethod
    def keep_window(self) -> None:
        """Forget what lies before the window."""

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens, and those before the window.

        Raises:
            RuntimeError: The window has been passed and the past was not recorded.
        """
        passed = _passed_window(cast(Any, self), tokens_to_remove)
        if not self.is_initialized:
            return
        self.take_off(-tokens_to_remove)
        if passed:
            self.keep_window()
            self.cumulative_length += tokens_to_remove
        elif tokens_to_remove:
            self.cumulative_length = self.keys.shape[2]


def replaced(
    layer: Any, whole: Callable[[], Any], sliding: Callable[[int], Any], other: Callable[[Any], Any]
) -> Any:
    """What does an empty stock layer's work: made by `whole` or by `sliding`; `other` is asked of any other kind."""
    if type(layer) is DynamicLayer:
        return whole()
    if type(layer) is DynamicSlidingWindowLayer:
        made = sliding(layer.sliding_window)
        made.record_past = layer.record_past
        return made
    return other(layer)


def replace_layers(
    cache: Cache, whole: Callable[[], Any], sliding: Callable[[int], Any], other: Callable[[Any], Any]
) -> Cache:
    """Give a `DynamicCache` that is still empty other layers, as `replaced` makes them; returns the cache.

    Raises:
        ValueError: The cache holds tokens already.
    """
    if holds_tokens(cache):
        raise ValueError(
            f"cache: this {type(cache).__name__} holds tokens already; change its layers before the first update"
        )
    cache.layers = [replaced(layer, whole, sliding, other) for layer in cache.layers]
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = cast(Any, whole)
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


def _passed_window(layer: DynamicSlidingWindowLayer, tokens_to_remove: int) -> bool:
    """Returns whether a sliding layer that is to take tokens off its end has dropped any at its front.

    Raises:
        RuntimeError: It has, and what it would need again was not recorded.
    """
    negative(tokens_to_remove)
    passed = layer.get_seq_length() >= layer.sliding_window
    if passed and not layer.record_past:
        raise RuntimeError(
            f"crop: the window of {layer.sliding_window} tokens is passed, what lies before is gone; "
            "call activate_past_recording() before the tokens that may have to be taken back"
        )
    return passed


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


def refuse_assigned(keys: Any, kind: type) -> None:
    """Refuse keys that somebody has put into a layer whose tokens lie elsewhere.

    Raises:
        TypeError: They are none of its own.
    """
    if not isinstance(keys, kind):
        raise TypeError(
            f"cache: its keys were replaced by a {type(keys).__name__}, expected them left as they are, since they "
            'stand for codes or windows that lie elsewhere; choose tokens in a cache of numbers (cache="model")'
        )


def after_copies(device: torch.device) -> None:
    """Makes the current stream wait for the default stream, which copies offloaded tokens.

    Transformers waits in its own `update` from 5.20 on; before, it may fetch tokens whose copy to the host
    is unfinished.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(torch.cuda.default_stream(device))
