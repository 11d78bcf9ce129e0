"""Cache layers of Transformers whose tokens lie in storage that grows in place, as numbers or as codes.

What a layer of numbers hands to attention is what a layer that concatenates hands to it, value for value. A layer of
codes hands on what stands for them (`carrier.py`), but for a prompt, which is read unrounded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from adaattn_hf.attention.stored import CHANNELS

from .groups import Span
from .growing import GROWTH
from .tokens import PROMPT, Tokens, numbers_like


class KeptLayer:
    """What all layers of this package share. A mixin, named before the layer of Transformers that it changes.

    `keys` and `values` are windows on the storage, or stand for its codes. What somebody else assigns to those of a
    layer of numbers is what it holds from then on, as in Transformers' own; then there is no storage.

    Attributes:
        stored: What the tokens are kept as, one of `CACHES`.
        reserve, growth, limit: Tokens of room at once, factor on it where it is used up, most tokens there may be.
        fixed: Codes of all tokens have their room from the start, for graphs that are captured.
        spans: What each head keeps, in layers whose heads keep different tokens.
        tokens: The storage.
    """

    stored: str
    reserve: int = 0
    growth: float = GROWTH
    limit: int | None = None
    fixed: bool = False
    spans: tuple[Span | None, ...] | None = None
    tokens: Tokens | None = None
    _shown: tuple[Any, Any] = (None, None)
    record_past: bool
    is_initialized: bool
    device: torch.device
    dtype: torch.dtype
    keys: Any
    values: Any

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Be the layer of tokens shaped like these. ValueError if values have too few channels for it."""
        check_channels(self.stored, value_states.shape[3])
        super().lazy_initialization(key_states, value_states)  # type: ignore[misc]
        self.dtype = key_states.dtype
        self._show(self.keys, self.values)

    # ---------------- what is held
    def kept(self) -> Sequence[Tokens]:
        """The storage; none where keys and values are plain tensors. TypeError if such stand for codes."""
        if self.tokens is not None and self._assigned():
            self.tokens = None
        return () if self.tokens is None else (self.tokens,)

    def _assigned(self) -> bool:
        if self.keys is self._shown[0] and self.values is self._shown[1]:
            return False
        if self.stored != "model" or self.spans:
            raise TypeError(
                f"cache: its keys were replaced by a {type(self.keys).__name__}, expected them left as they are, since "
                'they stand for codes or windows stored elsewhere; to edit keys, use cache="model"'
            )
        return True

    def _show(self, keys: Any, values: Any) -> None:
        self._shown = self.keys, self.values = keys, values

    def look(self) -> None:
        """Point `keys` and `values` at what the storage holds now."""
        if self.tokens is not None:
            self._show(*self.tokens.shown(self.tokens.whole()))

    def held(self) -> dict[str, Tensor]:
        """All tensors of the tokens, by name; `take` puts them into an empty layer."""
        kept = self.kept()
        return kept[0].held() if kept else {"keys": self.keys, "values": self.values}

    def take(self, held: Mapping[str, Tensor], length: int, dtype: torch.dtype) -> None:
        """Fill this empty layer with what `held` gave, of `length` tokens seen by a model of this dtype."""
        like = numbers_like(held, dtype)
        self.lazy_initialization(*like)
        self._restart(*like).take(held)
        self.look()

    # ---------------- writing
    def _append(self, key_states: Tensor, value_states: Tensor) -> None:
        numbers = self.stored == "model"
        if not numbers:
            refuse_gradients("rounded", key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        kept = self.kept()
        if numbers and torch.is_grad_enabled():
            # autograd forbids writing into tensors that it saved
            self.tokens = None
            self.keys = torch.cat([self.keys, key_states], dim=2)
            self.values = torch.cat([self.values, value_states], dim=2)
            return
        tokens = kept[0] if kept else self._restart(key_states, value_states)
        same_rows(tokens.parts[0].room.shape[0], key_states)
        # what stands for a whole room stays the same from step to step, as graphs are guarded by it
        stays = tokens.count is not None and (torch.compiler.is_compiling() or len(tokens) > 0)
        parts = tokens.append(key_states, value_states)
        if not stays:
            self._show(*tokens.shown(parts))

    def _restart(self, key_states: Tensor, value_states: Tensor) -> Tokens:
        plain = self.keys.numel() > 0
        keys, values = (self.keys, self.values) if plain else (key_states, value_states)
        self.tokens = Tokens(keys, values, self.stored, self.reserve, self.growth, fixed=self.fixed)
        if plain:
            self.tokens.take({"keys": keys, "values": values})
        return self.tokens

    def _prompt(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Returns a prompt unrounded; attention finds the storage on it, and has it rounded again for its queries."""
        setattr(key_states, PROMPT, self.tokens)
        return key_states, value_states

    # ---------------- changing
    def __copy__(self) -> Any:
        """A layer of its own, as a shallow copy of a layer that concatenates is: two must not append to one storage."""
        return copy.deepcopy(self)

    def change(self, tokens: Callable[[Tokens], None], plain: Callable[[Tensor], Tensor]) -> None:
        """Change all tokens: storage in place, plain keys and values to what `plain` returns of them."""
        kept = self.kept()
        if kept:
            self._show(None, None)  # the storage looks for others that hold windows on it
            for one in kept:
                tokens(one)
            self.look()
        elif self.is_initialized and self.keys.numel():
            self.keys, self.values = plain(self.keys), plain(self.values)

    def take_off(self, count: int) -> None:
        """Forget the last `count` tokens."""
        if count:
            self.change(lambda tokens: tokens.crop(count), lambda plain: plain[:, :, :-count])

    def offload(self) -> None:
        """Move the tokens to the CPU."""
        self._move("cpu")

    def prefetch(self) -> None:
        """Move the tokens back to the device of the layer."""
        if self.is_initialized:
            if self.device.type == "cuda":
                # The default stream copies offloaded tokens. Transformers waits for it in its own `update` from 5.20
                # on; before, it may fetch tokens whose copy to the host is unfinished.
                torch.cuda.current_stream(self.device).wait_stream(torch.cuda.default_stream(self.device))
            self._move(self.device)

    def _move(self, device: torch.device | str) -> None:
        self.change(lambda tokens: tokens.to(device), lambda plain: plain.to(device))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make each batch row what row `beam_idx` was (beam search); rows that stay are not copied."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows of the batch."""
        self.change(lambda tokens: tokens.select(indices), lambda plain: plain[indices.to(plain.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch."""
        self.change(lambda tokens: tokens.repeat(repeats), lambda plain: plain.repeat_interleave(repeats, dim=0))

    def reset(self) -> None:
        """Forget all tokens. (Stock layers up to Transformers 5.17 keep their length and set the tokens to zero.)"""
        self.tokens = None
        self._show(None, None)
        self.is_initialized = False
        super().reset()  # type: ignore[misc]


class FullLayer(KeptLayer, DynamicLayer):
    """A layer of full attention: keeps everything, up to `max_cache_len` tokens."""

    def __init__(
        self,
        stored: str,
        reserve: int = 0,
        growth: float = GROWTH,
        max_cache_len: int | None = None,
        fixed: bool = False,
    ) -> None:
        """`stored` is one of `CACHES`; the rest as in `AdaAttnCache`, and `fixed` as said, beside `max_cache_len`."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.stored, self.growth, self.limit = stored, growth, max_cache_len
        self.reserve = reserve if max_cache_len is None else max_cache_len
        self.fixed = self.is_compileable = fixed

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Append `[batch, heads, n, head_dim]`; returns all keys and values, the first ones unrounded."""
        count, first = key_states.shape[2], False
        if self.fixed and torch.compiler.is_compiling():
            if count > 1 or self.tokens is None:
                stored: tuple[Any, Any] = prompts_are_stored_outside_graphs(self.update, key_states, value_states)
                return stored
        else:
            past = self.held_length()
            first = not past
            room_for(self.limit, past + count)
        self._append(key_states, value_states)
        if self.stored != "model" and first:
            return self._prompt(key_states, value_states)
        if self.fixed and self.tokens is not None and count > 1:
            return self.tokens.shown()
        return self.keys, self.values

    def held_length(self) -> int:
        """Tokens held, as the host knows or has to ask."""
        return len(self.tokens) if self.fixed and self.tokens is not None else super().get_seq_length()

    def get_seq_length(self) -> Any:
        """Tokens held: a number, or the tensor that counts those of a fixed room, as in `StaticCache`."""
        counted = None if self.tokens is None else self.tokens.count
        return super().get_seq_length() if counted is None else counted

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys that a call reads, and the place of the first: one token reads a fixed room as a whole."""
        if not self.fixed:
            return super().get_mask_sizes(query_length)
        if query_length == 1 and self.tokens is not None:
            return self.get_max_length(), 0
        return self.held_length() + query_length, 0

    def get_max_length(self) -> int:
        """`max_cache_len`, -1 where the layer grows."""
        return -1 if self.limit is None else self.limit

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens; the count is negative, as in Transformers."""
        negative(tokens_to_remove)
        self.take_off(-tokens_to_remove)


class SlidingLayer(KeptLayer, DynamicSlidingWindowLayer):
    """A layer of sliding or chunked attention: keeps the last `sliding_window - 1` tokens."""

    def __init__(self, stored: str, sliding_window: int, growth: float = GROWTH) -> None:
        """`stored` is one of `CACHES`."""
        super().__init__(sliding_window=sliding_window)
        self.stored, self.growth = stored, growth

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Append `[batch, heads, n, head_dim]`; returns the keys and values that the queries can see."""
        count, first, keep = key_states.shape[2], self.cumulative_length == 0, self.sliding_window - 1
        numbers = self.stored == "model"
        if first and numbers and count > keep and not (self.record_past or torch.is_grad_enabled()):
            # a long prompt is used once; only the window's worth of it is worth room
            self._append(key_states[:, :, -keep:], value_states[:, :, -keep:])
            seen = key_states, value_states
        else:
            self._append(key_states, value_states)
            seen = self._last(keep + count)
            if not self.record_past:
                self.keep_window()
        self.cumulative_length += count
        return self._prompt(key_states, value_states) if first and not numbers else seen

    def _last(self, count: int) -> tuple[Any, Any]:
        if self.keys.shape[2] <= count:
            return self.keys, self.values
        kept = self.kept()
        return kept[0].shown(last=count) if kept else (self.keys[:, :, -count:], self.values[:, :, -count:])

    def keep_window(self) -> None:
        """Forget what lies before the window."""
        keep = self.sliding_window - 1
        self.change(lambda tokens: tokens.keep_last(keep), lambda plain: plain[:, :, -keep:])

    def take(self, held: Mapping[str, Tensor], length: int, dtype: torch.dtype) -> None:
        """Fill this empty layer with what `held` gave, of `length` tokens seen by a model of this dtype."""
        super().take(held, length, dtype)
        self.cumulative_length = length

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
        self.take_off(-tokens_to_remove)
        if passed:
            self.keep_window()
            self.cumulative_length += tokens_to_remove
        elif tokens_to_remove:
            self.cumulative_length = self.keys.shape[2]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def prompts_are_stored_outside_graphs(update: Any, /, *tokens: Tensor) -> tuple[Any, Any]:
    """Updates a fixed room by several tokens, which are counted on the host; named for torch's errors."""
    found: tuple[Any, Any] = update(*tokens)
    return found


def check_channels(stored: str, head_dim: int) -> None:
    """Refuse values of too few channels for a format."""
    if stored == "k8v4" and head_dim % CHANNELS:
        raise ValueError(
            f"cache: 'k8v4' keeps values in groups of {CHANNELS} channels, this model's values have {head_dim}; "
            "use cache='int8'"
        )


def refuse_gradients(lost: str, key_states: Tensor, value_states: Tensor) -> None:
    """Refuse tokens that want a gradient, where `lost` says what the cache does to keys."""
    if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
        raise RuntimeError(
            f"cache: keys that are {lost} have no gradient; call the model under torch.no_grad(), or train with "
            "use_cache=False"
        )


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
