"""Cache layers of Transformers whose tokens lie in a store that grows in place, as numbers or as codes.

What a layer of numbers hands to attention is what a layer that concatenates hands to it, value for value. A layer of
codes hands on what stands for them (`StoredTensor`), but for a prompt, which is read unrounded.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from .formats import FORMATS, Codes, StoredTensor, check_channels
from .store import Room, Store


class CachedLayer(DynamicLayer):
    """A layer that keeps every token, or the last `sliding_window - 1` ones.

    `keys` and `values` are views of the store, or stand for its codes: the package says how long they are valid. A
    layer of numbers holds what is assigned to them from then on, as Transformers' own do.

    Attributes:
        stored, format: What the tokens are kept as, one of `FORMATS`, and what is kept of a token.
        room: How much room there is for them.
        store: The tokens; None before the first ones.
        spans: What each head keeps, in layers whose heads keep different tokens.
        record_past: Tokens that leave the window stay until the next `crop`.
    """

    spans: tuple[tuple[int, int] | None, ...] | None = None

    def __init__(self, stored: str, room: Room | None = None, sliding_window: int | None = None) -> None:
        """`stored` is one of `FORMATS`; without `room` it grows as tokens come."""
        self._assigned: dict[int, Tensor] = {}
        super().__init__()  # type: ignore[no-untyped-call]
        self.stored, self.format = stored, FORMATS[stored]
        self.room, self.sliding_window = room or Room(), sliding_window
        self.is_sliding, self.is_compileable = sliding_window is not None, self.room.fixed
        self.record_past = False
        self.reset()

    def reset(self) -> None:
        """Forget all tokens. (Stock layers up to Transformers 5.17 keep their length and set the tokens to zero.)"""
        self.store: Store | None = None
        self.is_initialized, self.cumulative_length = False, 0
        self._assigned = {}
        self._in_graphs: tuple[Any, Any] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make room for tokens shaped like these. ValueError if values have too few channels for the format."""
        check_channels(self.stored, value_states.shape[3])
        self.device, self.dtype, self.is_initialized = key_states.device, key_states.dtype, True
        tokens, numbers = key_states.shape[2], self.format.is_numbers
        if self.sliding_window is not None and numbers and not self.record_past:
            tokens = min(tokens, self.sliding_window - 1)  # more of a prompt is not stored
        if numbers and torch.is_grad_enabled():
            tokens = 0  # they are concatenated, into no room
        self.store = self.format.store(key_states, value_states, self.room, tokens)

    # ---------------- what is held
    @property
    def _sliding_window_tensor(self) -> Tensor | None:
        """The window, which iterating over a cache gives, and from which `DynamicCache(list(cache))` makes a layer."""
        if self.sliding_window is None:
            return None
        device = self.device if self.is_initialized else "cpu"
        return torch.tensor(self.sliding_window, dtype=torch.long, device=device)

    def _shown(self, which: int) -> Any:
        if which in self._assigned:
            return self._assigned[which]
        return (self._in_graphs or self._views())[which] if self.is_initialized else None

    def _assign(self, which: int, tensor: Any) -> None:
        if tensor is None:  # as layers of Transformers begin
            return
        if self.spans or not self.format.is_numbers:
            raise TypeError(
                f"cache: its keys were replaced by a {type(tensor).__name__}, expected them left as they are, since "
                'they stand for codes or windows stored elsewhere; to edit keys, use cache="model"'
            )
        self._assigned[which] = tensor

    # `[batch, heads, length, head_dim]` of all tokens, or what stands for it; None before the first ones
    keys: Any = property(lambda self: self._shown(0), lambda self, keys: self._assign(0, keys))
    values: Any = property(lambda self: self._shown(1), lambda self, values: self._assign(1, values))

    def _views(self, last: int | None = None, parts: Sequence[Tensor] | None = None) -> tuple[Any, Any]:
        """Keys and values as attention is handed them: of all tokens, of the `last` ones, or `parts` of the store."""
        store = self.store
        assert store is not None
        first = last is None or last >= len(store)
        key, value, record = self.format.read(store, store.views(last) if parts is None else parts, first)
        if record is None:
            return key, value
        return StoredTensor(key, record, self.dtype), StoredTensor(value, record, self.dtype)

    def stores(self) -> Sequence[Store]:
        """All there are; tokens that were assigned come into one of their own."""
        if self._assigned:
            keys, values = self.keys, self.values
            if keys.shape[:3] != values.shape[:3]:
                raise ValueError(
                    f"cache: its keys were replaced by {list(keys.shape)} beside values {list(values.shape)}, expected "
                    "the same sequences, heads and tokens of both; assign the layer's values, too"
                )
            self._assigned = {}
            self.store = self.format.restored({"keys": keys, "values": values}, self.room)
        return () if self.store is None else (self.store,)

    def held(self) -> dict[str, Tensor]:
        """All tensors of the tokens, by name; `take` puts them into an empty layer."""
        return self.stores()[0].held()

    def take(self, held: Mapping[str, Tensor], length: int, dtype: torch.dtype) -> None:
        """Fill this empty layer with what `held` gave, of `length` tokens seen by a model of this dtype."""
        self.store = self.format.restored(held, self.room)
        self.device, self.dtype, self.is_initialized = self.store.device, dtype, True
        self.cumulative_length = length
        self._settle()

    def held_length(self) -> int:
        """Tokens seen, as the host knows or has to ask."""
        if self.sliding_window is not None or self.spans:
            return self.cumulative_length
        if self._assigned:
            return int(self.keys.shape[2])
        return 0 if self.store is None else len(self.store)

    def get_seq_length(self) -> Any:
        """Tokens seen: a number, or the tensor that counts those of a fixed room, as in `StaticCache`."""
        return self.stores()[0].count if self.room.fixed and self.is_initialized else self.held_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys that a call reads, and the place of the first: one token reads a fixed room as a whole."""
        if self.room.fixed and query_length == 1 and self.is_initialized:
            return self.get_max_length(), 0
        length = self.held_length()
        seen = length if self.sliding_window is None else min(length, self.sliding_window - 1)
        return seen + query_length, length - seen

    def get_max_length(self) -> int:
        """The window or `max_cache_len`; -1 where the layer grows."""
        return next((limit for limit in (self.sliding_window, self.room.limit) if limit is not None), -1)

    # ---------------- writing
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Append `[batch, heads, n, head_dim]`; returns the keys and values that the queries can see.

        Of codes the first tokens are returned unrounded: attention reads them so, and tells the layer their queries.
        """
        count = key_states.shape[2]
        if self.room.fixed and torch.compiler.is_compiling():
            if count > 1 or not self.steps_in_graphs:
                outside: tuple[Any, Any] = prompts_are_stored_outside_graphs(self.update, key_states, value_states)
                return outside
            return self._step_in_graph(key_states, value_states)
        lost = "dropped" if self.spans else "" if self.format.is_numbers else "rounded"
        if lost and torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise RuntimeError(
                f"cache: keys that are {lost} have no gradient; call the model under torch.no_grad(), or train with "
                "use_cache=False"
            )
        past, whole = self.held_length(), self.room.fixed and self.is_initialized and count == 1
        self.room.check(past + count)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        batch = self.stores()[0].batch
        if key_states.shape[0] != batch:
            raise ValueError(
                f"past_key_values: got tokens of {key_states.shape[0]} sequences for a cache that holds {batch}; begin "
                "a new cache, or call batch_repeat_interleave or batch_select_indices on this one"
            )
        self.cumulative_length += count
        return self._take_tokens(key_states, value_states, past, whole)

    @property
    def steps_in_graphs(self) -> bool:
        """Whether a graph can write and read the next token of a fixed room."""
        return self.store is not None

    def _step_in_graph(self, keys: Tensor, values: Tensor) -> tuple[Any, Any]:
        assert self.store is not None
        self.format.append(self.store, keys, values)
        return self.keys, self.values

    def _take_tokens(self, keys: Tensor, values: Tensor, past: int, whole: bool) -> tuple[Any, Any]:
        """Store tokens behind the `past`; returns what they read, `whole`: a fixed room with its empty places."""
        (store,), count, window = self.stores(), keys.shape[2], self.sliding_window
        keep = past + count if window is None else window - 1
        if not past and count > keep and self.format.is_numbers and not self.record_past:
            # a long prompt is used once; only the window's worth of it is worth room
            self.format.append(store, keys[:, :, count - keep :], values[:, :, count - keep :])
            return keys, values
        self.format.append(store, keys, values)
        if not past:
            self._settle()
        if not past and not self.format.is_numbers:
            read = StoredTensor(keys, None, self.dtype, prompt=self), StoredTensor(values, None, self.dtype)
        elif whole:
            read = self.keys, self.values
        else:
            read = self._views(None if window is None else keep + count)
        if window is not None and not self.record_past:
            self._keep(keep)
        return read

    def _keep(self, last: int) -> None:
        for store in self.stores():
            if len(store) > last:
                store.per_sequence.pop("first", None)
            store.keep_last(last)

    def reread(self, queries: Tensor, keys: Tensor) -> None:
        """Round a prompt's keys, which `update` returned, once more: for queries like the prompt's own."""
        if isinstance(self.format, Codes):
            self.format.reread(self.stores()[0], queries, keys)
            self._settle()

    def _settle(self) -> None:
        """Show graphs the same objects in every step, as they are guarded by them."""
        if self.room.fixed and self.store is not None:
            self.store.stay()
            self._in_graphs = self._views(parts=[*self.store.rooms.values()])

    # ---------------- changing
    def __copy__(self) -> Any:
        """A layer of its own, as a shallow copy of a layer that concatenates is: two must not append to one store."""
        return copy.deepcopy(self)

    def _change(self, change: Callable[[Store], None]) -> None:
        for store in self.stores():
            change(store)
        self._settle()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens, and those before the window; as in Transformers not a positive.

        A RuntimeError where what would be read then is gone, and the past was not recorded.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"tokens_to_remove: got {tokens_to_remove}, expected 0 or less: minus the number to take off the end"
            )
        self._forget(-index(tokens_to_remove))  # assisted decoding of Transformers 5.17 counts by tensors

    def _forget(self, count: int) -> None:
        window = self.sliding_window
        if window is not None and self.cumulative_length >= window and not self.record_past:
            raise RuntimeError(
                f"crop: the window of {window} tokens is passed, what lies before is gone; "
                "call activate_past_recording() before the tokens that may have to be taken back"
            )
        self._change(lambda store: store.crop(count))
        self.cumulative_length = max(0, self.cumulative_length - count)
        if window is not None:
            self._keep(window - 1)

    def activate_past_recording(self) -> None:
        """From now to the next `crop`, keep what it may have to bring back; assisted decoding calls this."""
        self.record_past = True

    def offload(self) -> None:
        """Move the tokens to the CPU."""
        self._change(lambda store: store.to("cpu"))

    def prefetch(self) -> None:
        """Move the tokens back to the device of the layer."""
        if self.is_initialized:
            if self.device.type == "cuda":
                # The default stream copies offloaded tokens. Transformers waits for it in its own `update` from 5.20
                # on; before, it may fetch tokens whose copy to the host is unfinished.
                torch.cuda.current_stream(self.device).wait_stream(torch.cuda.default_stream(self.device))
            self._change(lambda store: store.to(self.device))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make each batch row what row `beam_idx` was (beam search); rows that stay are not copied."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch."""
        for store in self.stores()[:1]:
            self.batch_select_indices(torch.arange(store.batch, device=store.device).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows of the batch."""
        self._change(lambda store: store.select(indices))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def prompts_are_stored_outside_graphs(update: Any, /, *tokens: Tensor) -> tuple[Any, Any]:
    """Updates a fixed room by several tokens, which are counted on the host; named for torch's errors."""
    views: tuple[Any, Any] = update(*tokens)
    return views
