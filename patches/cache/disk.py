"""Saves a cache to a file and loads it: a prompt is read once and continued later, by this process or another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedModel

from adaattn_hf._files import write_atomically
from adaattn_hf.plans.fit import model_hash

from .stored import AdaAttnCache, made_for

_VERSION = 3
_KEY = "adaattn_cache"


def save_cache(cache: AdaAttnCache, path: str | Path, model: PreTrainedModel | None = None) -> Path:
    """Writes a cache as safetensors: its tokens as they are stored, spare room left out.

    Args:
        cache: Any `AdaAttnCache`.
        path: The file, replaced as a whole.
        model: Whose keys and values they are. Then `load_cache` refuses the file for other weights, too, and not only
            for a model of another kind or size.

    Raises:
        TypeError: It is a cache of another kind.
    """
    if not isinstance(cache, AdaAttnCache):
        raise TypeError(
            f"cache: got {type(cache).__name__}, expected an AdaAttnCache, such as AdaAttnCache(model, 'model'), "
            "which keeps numbers"
        )
    tensors: dict[str, Tensor] = {}
    layers: list[dict[str, Any]] = []
    held: list[Any] = list(cache.layers)
    for index, layer in enumerate(held):
        layers.append(
            {
                "length": layer.get_seq_length(),
                "window": getattr(layer, "sliding_window", None),
                "spans": getattr(layer, "spans", None),
            }
            if layer.is_initialized
            else {}
        )
        for name, tensor in _held(cache, layer).items():
            tensors[f"{index}.{name}"] = tensor.detach().cpu().contiguous()
    about = {
        "version": _VERSION,
        "stored": cache.stored,
        "streaming": cache.streaming,
        "made_for": cache.made_for,
        "weights": None if model is None else model_hash(model),
        "layers": layers,
    }
    write_atomically(Path(path), save(tensors, {_KEY: json.dumps(about)}))
    return Path(path)


def load_cache(path: str | Path, model: PreTrainedModel, **room: Any) -> AdaAttnCache:
    """Reads a cache that `save_cache` wrote, onto the model's device.

    Args:
        path: The file.
        model: The model whose keys and values they are.
        room: `reserve`, `max_cache_len`, `growth` of `AdaAttnCache`.

    Raises:
        ValueError: The file holds no cache, or one of another model than this, or of other weights.
    """
    try:
        opened = safe_open(str(path), framework="pt", device=str(model.device))
    except SafetensorError as error:
        raise ValueError(
            f"path: {path} is no safetensors file ({error}), expected one that save_cache wrote"
        ) from error
    with opened as file:
        about = json.loads((file.metadata() or {}).get(_KEY, "{}"))
        if about.get("version") != _VERSION:
            raise ValueError(
                f"path: {path} holds no cache of this version, expected a file written by save_cache"
            )
        _check_model(path, about, model)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    cache = AdaAttnCache(model, about["stored"], streaming=about.get("streaming", False), **room)
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    windows = [getattr(layer, "sliding_window", None) for layer in cache.layers]
    saved = [layer.get("window") for layer in about["layers"]]
    if len(saved) > count or any(
        own != old for own, old in zip(windows, saved, strict=False) if old is not None
    ):
        raise ValueError(
            f"path: {path} holds {len(saved)} layers with windows {sorted({w for w in saved if w})}, expected those of "
            f"{type(model).__name__}: {count} with windows {sorted({w for w in windows if w})}"
        )
    for index, layer_about in enumerate(about["layers"]):
        own: Any = getattr(cache.layers[index], "spans", None) if index < len(cache.layers) else None
        if layer_about and json.loads(json.dumps(own)) != layer_about.get("spans"):
            raise ValueError(
                f"path: {path} was written under a plan with other windows in layer {index}, expected "
                f"{own} for its heads; load the model with the plan that the cache was made with"
            )
        if layer_about:
            prefix = f"{index}."
            held = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
            _fill(cache, index, held, layer_about["length"], model.dtype)
    return cache


def _check_model(path: str | Path, about: Any, model: PreTrainedModel) -> None:
    """Refuses a file of a model of another kind or size, or of other weights where the file names them."""
    own = made_for(model)
    other = {
        name: about["made_for"].get(name)
        for name, value in own.items()
        if about["made_for"].get(name) != value
    }
    if other:
        raise ValueError(
            f"path: {path} was made for a model with {_listed(other)}, expected {_listed(own, *other)} of this "
            f"{type(model).__name__}; load it with the model that made it, or read the prompt again"
        )
    if about["weights"] is not None and about["weights"] != model_hash(model):
        raise ValueError(
            f"path: {path} was made by a {type(model).__name__} with other weights (fine-tuned, another checkpoint), "
            "expected those that made it; load it with that model, or read the prompt again"
        )


def _listed(sizes: dict[str, Any], *names: str) -> str:
    return ", ".join(f"{name} {sizes[name]}" for name in names or sizes)


def _held(cache: AdaAttnCache, layer: Any) -> dict[str, Tensor]:
    if not layer.is_initialized:
        return {}
    if cache.stored == "model" and not hasattr(layer, "spans"):
        return {"keys": layer.keys, "values": layer.values}
    held: dict[str, Tensor] = (layer if hasattr(layer, "spans") else layer.tokens).held()
    return held


def _fill(cache: AdaAttnCache, index: int, held: dict[str, Tensor], length: int, dtype: torch.dtype) -> None:
    """Puts tokens into an empty layer."""
    while len(cache.layers) <= index:
        made: Any = cache.layer_class_to_replicate
        cache.layers.append(made())
    layer: Any = cache.layers[index]
    if hasattr(layer, "spans"):
        layer.take(held, length, dtype)
    elif cache.stored == "model":
        with torch.no_grad():
            layer.update(held["keys"], held["values"])
    else:
        layer.take(held, dtype)
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length = length
