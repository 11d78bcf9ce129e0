"""Prepares a loaded model: removes padding from the whole forward pass, and makes caches that grow in place.

    model = adaattn_hf.prepare(AutoModel.from_pretrained(name, attn_implementation="adaattn"))

Both are forward hooks; nothing in the model is replaced, and `restore` removes them.
"""

from __future__ import annotations

import inspect
from collections import Counter
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch.utils.hooks import RemovableHandle
from transformers import GenerationMixin
from transformers.cache_utils import DynamicCache

from adaattn_hf.attention.tracing import tracing

from .cache.caches import check_stored, convert_layers, holds_tokens, stored_as
from .models.cache_keyword import arguments_of, cache_in, cache_keyword
from .models.support import Holder, Model, model_in, refuse_no_model, refuse_other_attention, towers_of
from .unpad.check import unpadding_of
from .unpad.hooks import DirectForward, Unpadding, called_directly
from .unpad.packing import has_cache, makes_cache

_SLOT = "_adaattn_prepared"
"""Attribute in which a model keeps what was put on it, in this order; it is copied with the model."""


class PrepareError(ValueError):
    """A model cannot be prepared as asked; the message lists all reasons."""


def _give_cache(
    signature: inspect.Signature, stored: str, streaming: bool, module: Any, args: Any, kwargs: dict[str, Any]
) -> Any:
    """A hook before a pass: an empty `DynamicCache`, or none, gets layers that grow in place and store as asked."""
    if tracing():
        return None
    arguments = arguments_of(signature, args, kwargs)
    cache, planned = cache_in(arguments), module if streaming else None
    if cache is None:
        if (
            module.config.is_encoder_decoder
            or not makes_cache(module, arguments, module.config)
            # MiniMax makes a cache of its own class, and takes no other
            or not vars(GenerationMixin)["_supports_default_dynamic_cache"].__func__(type(module))
        ):
            return None
        empty = DynamicCache(config=module.config.get_text_config(decoder=True))
        return (), {**arguments, str(cache_keyword(signature)): convert_layers(empty, stored, None, planned)}
    cache = getattr(cache, "self_attention_cache", cache)
    if type(cache) is DynamicCache and not holds_tokens(cache):
        convert_layers(cache, stored, None, planned)
    return None


def prepare(model: Model, *, unpad: bool = True, cache: str | None = None, streaming: bool | None = None) -> Model:
    """The same model, which computes real tokens only and whose caches grow in place.

    With `unpad`, padding is taken out where the model is entered and put back, as zeros, where it is left, so
    that embeddings, MLPs and token-wise heads pay for real tokens only. What cannot run without its padding
    (a cache that holds tokens already, attention weights asked for, a label scored at a padding position, a
    graph being traced) runs with it, as if unprepared; `unpad_calls` counts both kinds.

    Every empty `DynamicCache` that the model is called with, or would make, writes behind
    the past instead of concatenating: plain `model.generate(...)` then does.

    Args:
        model: A Transformers model loaded with `attn_implementation="adaattn"`, or what holds such models (a
            pipeline, PEFT, sentence-transformers). Models that were prepared before are prepared anew.
        unpad: Take the padding out.
        cache: What caches keep: `"model"` (numbers), or quantised, in place as well, `"int8"` or `"k8v4"`; see
            `AdaAttnCache`. None: what the model's plan was verified with, else numbers.
        streaming: Heads to which the model's plan gives a window keep that in the cache; see `AdaAttnCache`. None: as
            the plan was verified, with `cache`.

    Returns:
        `model`.

    Raises:
        PrepareError: `unpad` cannot be exact for this model (says every reason), or its attention is another's.
            Nothing is changed then.
        ValueError: A `cache` that this model cannot read, or `streaming` without a plan that has windows.
    """
    root = model_in(model)
    refuse_no_model(root)
    towers = [tower for _, tower in towers_of(root)]
    if not towers:
        raise PrepareError(f"model: {type(root).__name__} holds no Transformers model")
    if unpad:
        refuse_other_attention(root, PrepareError)
    restore(model)
    with ExitStack() as on_error:
        on_error.callback(restore, model)
        for tower in towers:
            parts: list[RemovableHandle | Unpadding | DirectForward] = []
            tower.__dict__[_SLOT] = parts
            signature = inspect.signature(type(tower).forward)
            caches = cache_keyword(signature)
            stored, streams = stored_as(tower, cache, streaming, "model")
            if (stored != "model" or streams) and not (caches and has_cache(tower.config)):
                raise PrepareError(f"cache: got {stored!r} for {type(tower).__name__}, which keeps no keys and values")
            check_stored(tower, stored, streams)
            if caches:
                hook = partial(_give_cache, signature, stored, streams)
                parts.append(tower.register_forward_pre_hook(hook, with_kwargs=True))
            if unpad:
                unpadding, reasons = unpadding_of(tower)
                if unpadding is None:
                    raise PrepareError(
                        f"unpad: {type(tower).__name__} cannot run without its padding: {'; '.join(reasons)}. Use "
                        "prepare(model, unpad=False), or leave it unprepared: its attention skips padding in any case"
                    )
                unpadding.install()
                parts.append(unpadding)
                if any(tower is module for module in called_directly(root)):
                    parts.append(DirectForward(tower))
        on_error.pop_all()
    return model


def restore(model: Model) -> Model:
    """Take away what `prepare` put on a model or on a part of it. Returns the model. Harmless without."""
    for module in model_in(model).modules():
        for part in reversed(module.__dict__.pop(_SLOT, [])):
            part.remove()
    return model


def unpad_calls(model: Holder) -> dict[str, int]:
    """How many forward passes of a prepared model ran `"unpadded"`, and how many as they came, by the reason.

    Calls inside a traced graph run as they came and are not counted.
    """
    counts: Counter[str] = Counter()
    for module in model_in(model).modules():
        for part in module.__dict__.get(_SLOT, ()):
            if isinstance(part, Unpadding):
                counts += Counter(part.calls)  # copied in one step: other threads may count meanwhile
    return dict(counts)
