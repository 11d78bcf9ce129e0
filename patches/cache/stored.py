"""A quantised key/value cache (8 or 4 bits) whose codes attention reads directly.

    model.generate(**inputs, past_key_values=adaattn_hf.AdaAttnCache(model, "int8"))

or once for a model, pipelines included: `adaattn_hf.prepare(model, cache="int8")`. Tokens are quantised when they are
written and never dequantised as a whole. A prompt read in one pass is attended to in full precision; later calls read
the codes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from adaattn_hf.attention.stored import CHANNELS, FORMATS

from ..models.families import family_of
from ..plans.attach import plan_of
from .carrier import StoredTensor
from .growing import GROWTH, check_room
from .kept import KeptTokens, Whole, Windowed, refuse_assigned, replace_layers, replaced, room_for, same_rows
from .layers import grow_in_place
from .tokens import PROMPT, StoredTokens

CACHES = ("model", *FORMATS)
"""What a cache can keep: numbers in the model's dtype, or one of the quantised formats."""


class _Stored(KeptTokens):
    """What full and sliding layers share: `keys` and `values` are codes with the surface of a tensor."""

    dtype: torch.dtype
    tokens: StoredTokens | None
    stored: str
    reserve: int = 0
    limit: int | None = None
    growth: float = GROWTH

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make room for tokens shaped like these."""
        _check_channels(self.stored, value_states.shape[3])
        self.dtype, self.device = key_states.dtype, key_states.device
        self.tokens = StoredTokens(key_states, value_states, self.stored, self.reserve, self.growth)
        self.is_initialized = True
        self.look()

    def _append(self, key_states: Tensor, value_states: Tensor) -> None:
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise RuntimeError(
                "cache: keys that are rounded have no gradient; call the model under torch.no_grad(), or train with "
                "use_cache=False"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.tokens is not None
        refuse_assigned(self.keys, StoredTensor)
        same_rows(self.keys.shape[0], key_states)
        room_for(self.limit, len(self.tokens) + key_states.shape[2])
        self.keys, self.values = self.tokens.carriers(self.tokens.append(key_states, value_states))

    def _prompt(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Returns a prompt unrounded; attention finds the stored tokens on it and rounds them again for its queries."""
        setattr(key_states, PROMPT, self.tokens)
        return key_states, value_states

    def take(self, held: dict[str, Tensor], dtype: torch.dtype) -> None:
        """Fill an empty layer with what `StoredTokens.held` gave."""
        keys, values = held["key_codes"], held["value_codes"]
        head_dim_v = values.shape[3] * (2 if values.dtype is torch.uint8 else 1)
        like = torch.empty((*values.shape[:2], 0, head_dim_v), dtype=dtype, device=values.device)
        self.lazy_initialization(keys[:, :, :0].to(dtype), like)
        assert self.tokens is not None
        self.tokens.take(held)
        self.look()

    def kept(self) -> list[StoredTokens]:
        """The tokens."""
        return [] if self.tokens is None else [self.tokens]

    def look(self) -> None:
        """Point `keys` and `values` at the codes that are held now."""
        if self.tokens is not None:
            self.keys, self.values = self.tokens.carriers()

    def reset(self) -> None:
        """Forget all tokens."""
        self.tokens = self.keys = self.values = None
        self.is_initialized = False
        super().reset()  # type: ignore[misc]


class StoredLayer(_Stored, Whole, DynamicLayer):
    """A layer of full attention: keeps everything."""

    def __init__(
        self, stored: str, reserve: int = 0, growth: float = GROWTH, max_cache_len: int | None = None
    ) -> None:
        """`stored` is one of the quantised formats; the rest as in `AdaAttnCache`."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.stored, self.tokens = stored, None
        self.set_room(reserve, growth, max_cache_len)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Append `[batch, heads, n, head_dim]`; returns all keys and values, the first ones unrounded."""
        first = self.get_seq_length() == 0
        self._append(key_states, value_states)
        return self._prompt(key_states, value_states) if first else (self.keys, self.values)

    def get_seq_length(self) -> int:
        """Tokens held."""
        return 0 if self.tokens is None else len(self.tokens)


class StoredSlidingLayer(_Stored, Windowed, DynamicSlidingWindowLayer):
    """A layer of sliding or chunked attention: keeps the window."""

    def __init__(self, stored: str, sliding_window: int, growth: float = GROWTH) -> None:
        """Keeps the last `sliding_window - 1` tokens."""
        super().__init__(sliding_window=sliding_window)
        self.stored, self.growth, self.tokens = stored, growth, None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Append `[batch, heads, n, head_dim]`; returns the keys and values that the queries can see."""
        first = self.cumulative_length == 0
        self._append(key_states, value_states)
        self.cumulative_length += key_states.shape[2]
        assert self.tokens is not None
        keys, values = self.keys, self.values
        if not self.record_past:
            self.keep_window()
        if first:
            return self._prompt(key_states, value_states)
        visible = self.sliding_window - 1 + key_states.shape[2]
        return (keys, values) if keys.shape[2] <= visible else self.tokens.carriers(last=visible)

    def keep_window(self) -> None:
        """Forget what lies before the window."""
        assert self.tokens is not None
        self.tokens.drop_front(self.sliding_window - 1)
        self.look()


_SIZES = (
    "model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"
)  # fmt: skip


def made_for(model: PreTrainedModel) -> dict[str, Any]:
    """What a configuration says of a model's keys and values: its type and sizes, None where it has no such name."""
    config = model.config.get_text_config(decoder=True)
    return {name: getattr(config, name, None) for name in _SIZES}


def _check_channels(stored: str, head_dim: int) -> None:
    if stored == "k8v4" and head_dim % CHANNELS:
        raise ValueError(
            f"cache: 'k8v4' keeps values in groups of {CHANNELS} channels, this model's values have {head_dim}; "
            "use cache='int8'"
        )


def check_stored(model: PreTrainedModel, stored: str, streaming: bool = False) -> None:
    """Whether a model can read a cache that is kept so.

    Raises:
        ValueError: Unknown format, a model of another attention implementation, an encoder-decoder, one that computes
            with its cached keys itself, or streaming heads without a plan that has windows.
    """
    if stored not in CACHES:
        raise ValueError(f"cache: got {stored!r}, expected one of {', '.join(CACHES)}")
    if stored == "model" and not streaming:
        return
    config = model.config.get_text_config(decoder=True)
    for layer in DynamicCache(config=config).layers:
        replaced(layer, *_makers(stored))
    if computes_with_cache(model):
        raise ValueError(
            f"cache: got {stored!r} for {type(model).__name__}, which computes with its cached keys itself before "
            'attention reads them, expected a model that hands them on; use cache="model", without streaming heads'
        )
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:
        raise ValueError(
            f"cache: got {stored!r} for {type(model).__name__}, which has no attention heads, expected a model that "
            "keeps keys and values; leave cache out"
        )
    _check_channels(stored, getattr(config, "head_dim", None) or config.hidden_size // heads)
    implementation = str(config._attn_implementation)
    if not implementation.startswith("adaattn"):
        raise ValueError(
            f"cache: got {stored!r} for {type(model).__name__} with attn_implementation={implementation!r}, which "
            'cannot read codes; load the model with attn_implementation="adaattn"'
        )
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"cache: got {stored!r} for the encoder-decoder {type(model).__name__}, expected a decoder; "
            'use cache="model"'
        )
    if streaming:
        from .streaming import spans_of

        spans_of(model)


def computes_with_cache(model: PreTrainedModel) -> bool:
    """Whether something in a model reads its cached keys before attention does.

    So do some families, and every layer whose cache holds compressed latents (MLA, which Transformers expands by this
    method).
    """
    family = family_of(model.config.get_text_config(decoder=True))
    return (family is not None and family.computes_with_cache) or any(
        hasattr(module, "expand_kv") for module in model.modules()
    )


def store_in_place(
    cache: Cache, stored: str, *, reserve: int = 0, growth: float = GROWTH, max_cache_len: int | None = None
) -> Cache:
    """Give a `DynamicCache` that is still empty layers that store keys and values as asked; returns the cache.

    Raises:
        ValueError: The cache holds tokens already, a layer is neither of full nor of sliding attention, or there is no
            room as asked.
    """
    check_room(reserve, growth, max_cache_len)
    return replace_layers(cache, *_makers(stored, reserve, growth, max_cache_len))


def _makers(
    stored: str, reserve: int = 0, growth: float = GROWTH, max_cache_len: int | None = None
) -> tuple[Callable[[], Any], Callable[[int], Any], Callable[[Any], Any]]:
    """What `kept.replaced` needs."""

    def other(layer: Any) -> Any:
        if getattr(layer, "spans", None) is not None:
            return layer
        raise ValueError(
            f"cache: got {stored!r} for a model with a {type(layer).__name__}, expected layers of full or sliding "
            'attention; use cache="model"'
        )

    whole = functools.partial(StoredLayer, stored, reserve, growth, max_cache_len)
    return whole, lambda window: StoredSlidingLayer(stored, window, growth), other


class AdaAttnCache(DynamicCache):
    """A cache that keeps keys and values as asked, grows in place, and is read as it is stored."""

    def __init__(
        self,
        model: PreTrainedModel,
        stored: str | None = None,
        *,
        reserve: int = 0,
        max_cache_len: int | None = None,
        growth: float = GROWTH,
        streaming: bool | None = None,
        offloading: bool = False,
        offload_only_non_sliding: bool = False,
    ) -> None:
        """An empty cache for a model.

        Args:
            model: Loaded with `attn_implementation="adaattn"`.
            stored: `"model"` (numbers in the model's dtype), `"int8"` (one scale per token and head) or `"k8v4"` (int8
                keys, values of four bits). None: what the model's plan was proven with, `"int8"` without such a proof.
            reserve: Tokens for which room is made at once in layers that keep everything.
            max_cache_len: The same, and more is refused: memory is what it was at the first token.
            growth: Factor on the length when room is made.
            streaming: Heads to which the model's plan gives a window keep its first and last tokens alone, for
                sequences up to the length that the plan speaks for. None: as the plan was proven, where `stored` is
                None, too.
            offloading: As in `DynamicCache`.
            offload_only_non_sliding: As in `DynamicCache`.

        Raises:
            TypeError: `model` is no model.
            ValueError: The model cannot read such a cache, `streaming` is asked of a model whose plan has no windows or
                beside `offloading`, that of a model on a CPU, or the room is no number of tokens.
        """
        if not hasattr(model, "config"):
            raise TypeError(
                f"model: got {type(model).__name__}, expected the loaded Transformers model that shall read the cache; "
                'call AdaAttnCache(model, "int8")'
            )
        self.stored, self.streaming = stored_as(model, stored, streaming, "int8")
        check_stored(model, self.stored, self.streaming)
        self.made_for = made_for(model)
        if offloading and model.device.type == "cpu":
            raise ValueError(
                "offloading: got True for a model on cpu, expected one on a CUDA device, whose memory it saves; leave "
                "it out"
            )
        config = model.config.get_text_config(decoder=True)
        super().__init__(
            config=config, offloading=offloading, offload_only_non_sliding=offload_only_non_sliding
        )
        room: Any = {"reserve": reserve, "growth": growth, "max_cache_len": max_cache_len}
        convert(self, model, self.stored, self.streaming, **room)


def stored_as(
    model: PreTrainedModel, stored: str | None, streaming: bool | None, default: str
) -> tuple[str, bool]:
    """What a model's cache stores and whether heads stream: as asked, else as its plan was proven, else the default."""
    plan = plan_of(model) if stored is None else None
    proven = (default, False) if plan is None or plan.cache is None else plan.cache
    return proven[0] if stored is None else stored, proven[1] if streaming is None else streaming


def convert(cache: Cache, model: PreTrainedModel, stored: str, streaming: bool, **room: Any) -> Cache:
    """Give an empty `DynamicCache` of a model layers that keep what is asked for; returns the cache.

    Raises:
        ValueError: Streaming heads are asked for beside offloading, or of a model whose plan has no windows.
    """
    if streaming:
        if cache.offloading:
            raise ValueError(
                "offloading: got True for a cache with streaming heads, whose tokens attention writes where it runs, "
                "expected False; such heads keep little, or use streaming=False"
            )
        from .streaming import spans_of, stream

        stream(cache, stored, spans_of(model), **room)
    return grow_in_place(cache, **room) if stored == "model" else store_in_place(cache, stored, **room)
