"""Key/value caches for Transformers that grow in place, as numbers or as codes of 8 or 4 bits that attention reads.

    model.generate(**inputs, past_key_values=adaattn_hf.GrowingCache(config=model.config))
    model.generate(**inputs, past_key_values=adaattn_hf.AdaAttnCache(model, "int8"))

or once for a model, pipelines included: `adaattn_hf.prepare(model)`, `adaattn_hf.prepare(model, cache="int8")`.

`DynamicCache` concatenates: every token generated moves the whole past of every layer. These write behind the past.
Codes are made when tokens are written, and never turned into numbers as a whole. A prompt read in one pass is attended
to in full precision; later calls read the codes.
"""

from __future__ import annotations

import functools
from typing import Any, cast

from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from adaattn_hf.attention.stored import CACHE_FORMATS
from adaattn_hf.plans.limits import unproven

from ..models.families import COMPUTES_WITH_CACHE, family_of
from ..plans.attach import plan_of
from .formats import check_channels
from .groups import Spans
from .layers import CachedLayer
from .store import GROWTH, Room
from .streaming import StreamingLayer, spans_of


class GrowingCache(DynamicCache):
    """`DynamicCache` without concatenation: same methods, same keys and values.

    Layers other than those of full, sliding or chunked attention (recurrent states, indexers) stay Transformers' own.
    """

    def __init__(
        self,
        config: Any = None,
        reserve: int = 0,
        growth: float = GROWTH,
        offloading: bool = False,
        offload_only_non_sliding: bool = False,
    ) -> None:
        """An empty cache.

        Args:
            config: Of the model; tells which layers slide. Without it all layers keep everything.
            reserve: Tokens for which room is made at once in layers that keep everything, e.g. prompt plus
                `max_new_tokens`: then nothing ever moves.
            growth: Factor on the length when room is made. 1.25 wastes at most a quarter.
            offloading, offload_only_non_sliding: As in `DynamicCache`.

        Raises:
            ValueError: `growth` is not larger than 1, or `reserve` is negative.
        """
        room = Room.of(reserve, growth)
        super().__init__(config=config, offloading=offloading, offload_only_non_sliding=offload_only_non_sliding)
        convert_layers(self, "model", room)


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
                keys, values of four bits). None: what the model's plan was verified with, else `"int8"`.
            reserve: Tokens for which room is made at once in layers that keep everything.
            max_cache_len: Most tokens. All memory is allocated at the first one, and more raise an error. With codes
                and full attention in all layers, `generate` then compiles its steps and captures them on a GPU, as with
                `StaticCache`.
            growth: Factor on the length when room is made.
            streaming: Heads to which the model's plan gives a window keep only the first tokens and the window, for
                sequences up to the plan's length. None: as the plan was verified if `stored` is None, else all tokens.
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
        room = Room.of(reserve, growth, max_cache_len)
        config = model.config.get_text_config(decoder=True)
        super().__init__(config=config, offloading=offloading, offload_only_non_sliding=offload_only_non_sliding)
        convert_layers(self, self.stored, room, model if self.streaming else None)


def convert_layers(
    cache: Cache, stored: str, room: Room | None = None, streaming_for: PreTrainedModel | None = None
) -> Cache:
    """Give a `DynamicCache` that is still empty layers that grow in place; returns the cache.

    Heads keep windows by the plan of the model that is named as `streaming_for`.

    ValueError: it holds tokens, codes are asked of a layer that is neither full nor sliding, or heads cannot stream:
    beside offloading, or by a plan without windows.
    """
    room, plan = room or Room(), None
    spans: dict[int, Spans] = {}
    if streaming_for is not None:
        if cache.offloading:
            raise ValueError(
                "offloading: got True for a cache with streaming heads, whose tokens attention writes where it runs, "
                "expected False; such heads keep little, or use streaming=False"
            )
        plan, spans = plan_of(streaming_for), spans_of(streaming_for)
    if holds_tokens(cache):
        raise ValueError(
            f"cache: this {type(cache).__name__} holds tokens already; change its layers before the first update"
        )
    add_layers(cache, max(spans, default=-1) + 1)
    # Steps of a captured graph read one mask for all layers: of all that there is room for. Streaming heads step in
    # graphs only where no sequence can grow beyond what their plan speaks for.
    full = all(type(layer) is DynamicLayer for layer in cache.layers)
    within = room.limit is not None and (plan is None or room.limit <= plan.lengths[-1])
    if within and stored != "model" and full and not cache.offloading:
        room = room._replace(fixed=True)
    layers: list[Any] = list(cache.layers)
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            layers[index] = StreamingLayer(spans[index], stored, room) if index in spans else CachedLayer(stored, room)
        elif type(layer) is DynamicSlidingWindowLayer:
            # a window's worth of tokens is all that it has room for, whatever is reserved
            layers[index] = CachedLayer(stored, Room(growth=room.growth), layer.sliding_window)
            layers[index].record_past = layer.record_past
        elif stored != "model" and not getattr(layer, "is_initialized", False):
            # a layer that is so from the start stores nothing
            raise ValueError(
                f"cache: got {stored!r} for a model with a {type(layer).__name__}, expected layers of full or sliding "
                'attention; use cache="model"'
            )
    cache.layers = layers
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = cast(Any, functools.partial(CachedLayer, stored, room))
    return cache


def add_layers(cache: Any, count: int) -> None:
    """Let there be so many layers at least: a cache without a configuration makes each when its first token comes."""
    while len(cache.layers) < count:
        cache.layers.append(cache.layer_class_to_replicate())


def holds_tokens(cache: Cache) -> bool:
    """Some layer of full or sliding attention has been updated."""
    return any(layer.is_initialized for layer in cache.layers if isinstance(layer, DynamicLayer))


def made_for(model: PreTrainedModel) -> dict[str, Any]:
    """What a configuration says of a model's keys and values: its type and sizes, None where it has no such name."""
    config = model.config.get_text_config(decoder=True)
    heads = "num_attention_heads", "num_key_value_heads", "head_dim"
    return {name: getattr(config, name, None) for name in ("model_type", "num_hidden_layers", "hidden_size", *heads)}


def stored_as(model: PreTrainedModel, stored: str | None, streaming: bool | None, default: str) -> tuple[str, bool]:
    """What a model's cache stores and whether heads stream: as asked, as its plan was verified, or the default."""
    plan = plan_of(model) if stored is None else None
    proven = None if plan is None or unproven(plan) else plan.cache
    proven_stored, proven_streaming = proven or (default, False)
    return proven_stored if stored is None else stored, proven_streaming if streaming is None else streaming


def check_stored(model: PreTrainedModel, stored: str, streaming: bool = False) -> None:
    """Refuses (ValueError) a cache that a model cannot read.

    That is an unknown format, a model of another attention implementation, an encoder-decoder, one that computes with
    its cached keys itself, or streaming heads without a plan that has windows.
    """
    if stored not in CACHE_FORMATS:
        raise ValueError(f"cache: got {stored!r}, expected one of {', '.join(CACHE_FORMATS)}")
    if stored == "model" and not streaming:
        return
    config = model.config.get_text_config(decoder=True)
    convert_layers(DynamicCache(config=config), stored)
    # some families do, and every layer whose cache holds compressed latents, which Transformers expands by `expand_kv`
    computes = family_of(config) in COMPUTES_WITH_CACHE or any(hasattr(part, "expand_kv") for part in model.modules())
    heads, implementation = getattr(config, "num_attention_heads", None), str(config._attn_implementation)
    for refused, why in (
        (computes, "which computes with its cached keys before attention reads them, expected a model that does not; "
         'use cache="model", without streaming heads'),
        (heads is None, "which has no attention heads, expected a model that keeps keys and values; leave cache out"),
        (not implementation.startswith("adaattn"), f"with attn_implementation={implementation!r}, which cannot read "
         'codes; load the model with attn_implementation="adaattn"'),
        (model.config.is_encoder_decoder, 'an encoder-decoder, expected a decoder; use cache="model"'),
    ):  # fmt: skip
        if refused:
            raise ValueError(f"cache: got {stored!r} for {type(model).__name__}, {why}")
    check_channels(stored, getattr(config, "head_dim", None) or config.hidden_size // (heads or 1))
    if streaming:
        spans_of(model)
