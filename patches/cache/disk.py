"""Saves a cache to a file and loads it: a prompt is read once and continued later, by this process or another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedModel

from adaattn_hf._files import parse_json, write_atomically
from adaattn_hf.attention.stored import CACHE_FORMATS
from adaattn_hf.plans.record import PlanError, whole

from ..models.support import refuse_no_model
from ..plans.attach import plan_of
from ..plans.hashes import model_hash
from .caches import AdaAttnCache, add_layers, made_for
from .formats import FORMATS
from .layers import CachedLayer
from .streaming import spans_in

FORMAT = 4
"""Of the file; rises with every change, and no other one is read."""
_KEY = "adaattn_cache"
_CHECKSUM = "sha256"
_FIELDS = {"version", "stored", "streaming", "made_for", "weights", "layers"}
_OF_LAYER = {"length", "window", "spans"}
_AGAIN = "read the prompt again and save its cache again"
_NUMBERS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def save_cache(cache: AdaAttnCache, path: str | Path, model: PreTrainedModel | None = None) -> Path:
    """Writes a cache as safetensors: its tokens as they are stored, spare room left out, and a checksum.

    Args:
        cache: Any `AdaAttnCache`.
        path: The file, replaced as a whole.
        model: Whose keys and values they are. Then `load_cache` refuses the file for other weights, too, and not only
            for a model of another kind or size.

    Raises:
        TypeError: It is a cache of another kind, or has layers that keep something else than keys and values.
    """
    if not isinstance(cache, AdaAttnCache):
        raise TypeError(
            f"cache: got {type(cache).__name__}, expected an AdaAttnCache, such as AdaAttnCache(model, 'model'), "
            "which keeps numbers"
        )
    tensors: dict[str, Tensor] = {}
    layers: list[dict[str, Any]] = []
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, CachedLayer):
            raise TypeError(
                f"cache: its layer {index} is a {type(layer).__name__}, expected layers of full or sliding attention, "
                "whose keys and values can be written; keep the cache in memory, such as by copy.deepcopy"
            )
        tokens = layer.held() if layer.get_seq_length() else {}
        layers.append(_described(layer) if tokens else {})
        for name, tensor in tokens.items():
            tensors[f"{index}.{name}"] = tensor.detach().cpu().contiguous()
    about = {
        "version": FORMAT,
        "stored": cache.stored,
        "streaming": cache.streaming,
        "made_for": cache.made_for,
        "weights": None if model is None else model_hash(model),
        "layers": layers,
    }
    text = json.dumps(about)
    write_atomically(Path(path), save(tensors, {_KEY: text, _CHECKSUM: _checksum(text, tensors)}))
    return Path(path)


def load_cache(path: str | Path, model: PreTrainedModel, **room: Any) -> AdaAttnCache:
    """Reads a cache that `save_cache` wrote, onto the model's device.

    Args:
        path: The file.
        model: The model whose keys and values they are.
        room: `reserve`, `max_cache_len`, `growth` of `AdaAttnCache`.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file holds no cache, a damaged one, one of another format or of another model than this, or of
            other weights; or there is no room as asked.
    """
    refuse_no_model(model)
    try:
        about, tensors = _read(path)
        _check_model(about, model)
        cache = AdaAttnCache(model, about["stored"], streaming=about["streaming"], **room)
        layers = _checked_layers(cache, about, tensors, model)
    except PlanError as error:  # says what is wrong with the file
        raise ValueError(f"path: {path} {error}") from error
    for index, (length, parts) in layers.items():
        layer: Any = cache.layers[index]
        layer.take({name: tensor.to(model.device) for name, tensor in parts.items()}, length, model.dtype)
    return cache


def _read(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError) as error:
        raise PlanError(f"is no safetensors file ({error}), expected one that save_cache wrote") from error
    if _KEY not in metadata:
        raise PlanError("is a safetensors file without a cache, expected one that save_cache wrote")
    try:
        about = parse_json(metadata[_KEY])
    except ValueError as error:
        raise PlanError(f"has a header that is no JSON ({error}), expected one of save_cache; {_AGAIN}") from error
    version = about.get("version") if isinstance(about, dict) else about
    if version != FORMAT:
        raise PlanError(f"holds no cache of this version, got format {version!r:.40}, expected {FORMAT}; {_AGAIN}")
    if metadata.get(_CHECKSUM) != _checksum(metadata[_KEY], tensors):
        raise PlanError(f"is damaged, its checksum is not that of its content, expected what was written; {_AGAIN}")
    _keys("header", about, _FIELDS)
    if about["stored"] not in CACHE_FORMATS or not isinstance(about["streaming"], bool):
        raise PlanError(
            f"stores {about['stored']!r:.40} with streaming {about['streaming']!r:.40}, expected one of "
            f"{', '.join(CACHE_FORMATS)} and true or false; {_AGAIN}"
        )
    return about, tensors


def _checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _keys(where: str, value: Any, expected: set[str]) -> None:
    if not isinstance(value, dict) or set(value) != expected:
        shown = sorted(value) if isinstance(value, dict) else value
        raise PlanError(f"has a {where} of {shown!r:.200}, expected {', '.join(sorted(expected))}; {_AGAIN}")


def _check_model(about: dict[str, Any], model: PreTrainedModel) -> None:
    expected, saved = made_for(model), about["made_for"]
    _keys("model", saved, set(expected))
    for name, value in expected.items():
        if saved[name] != value:
            raise PlanError(
                f"was made for a model with {name} {saved[name]!r:.40}, expected {name} {value!r:.40} of this "
                f"{type(model).__name__}; load it with the model that made it, or read the prompt again"
            )
    if about["weights"] is not None and about["weights"] != model_hash(model):
        raise PlanError(
            f"was made by a {type(model).__name__} with other weights (fine-tuned, another checkpoint), "
            "expected those that made it; load it with that model, or read the prompt again"
        )
    plan = plan_of(model)
    if about["streaming"] and (plan is None or not any(any(spans_in(layer)) for layer in plan.layers)):
        raise PlanError(
            "keeps of some heads the windows of a plan alone, expected a model with that plan; call "
            "adaattn_hf.load_plan(model, …) first, or read the prompt again"
        )


def _checked_layers(
    cache: AdaAttnCache, about: dict[str, Any], tensors: dict[str, Tensor], model: PreTrainedModel
) -> dict[int, tuple[int, dict[str, Tensor]]]:
    count = max(len(cache.layers), model.config.get_text_config(decoder=True).num_hidden_layers)
    layers = about["layers"]
    if not isinstance(layers, list) or len(layers) > count:
        shown = len(layers) if isinstance(layers, list) else layers
        raise PlanError(f"holds {shown!r:.40} layers, expected at most the {count} of {type(model).__name__}; {_AGAIN}")
    add_layers(cache, len(layers))
    checked: dict[int, tuple[int, dict[str, Tensor]]] = {}
    batch: int | None = None
    for index, description in enumerate(layers):
        if description == {}:
            continue
        _keys(f"layer {index}", description, _OF_LAYER)
        layer: Any = cache.layers[index]
        for name, expected in _described(layer).items():
            if name != "length" and description[name] != expected:
                raise PlanError(
                    f"holds a layer {index} with {name} {description[name]!r:.40}, expected {expected}, as of this "
                    f"{type(model).__name__} and its plan; load it with the model and the plan that made it"
                )
        prefix = f"{index}."
        parts = {name.removeprefix(prefix): tensors.pop(name) for name in [*tensors] if name.startswith(prefix)}
        length = whole(description["length"], f"holds a layer {index} whose length", least=1)
        batch = _check_layer(f"layer {index}", layer, cache.stored, parts, length, batch)
        layer.room.check(length)
        checked[index] = length, parts
    if tensors:
        raise PlanError(f"holds tensors {sorted(tensors)!r:.200} that no layer has, expected none; {_AGAIN}")
    return checked


def _described(layer: Any) -> dict[str, Any]:
    spans = layer.spans
    return {
        "length": int(layer.get_seq_length()),
        "window": getattr(layer, "sliding_window", None),
        "spans": None if spans is None else [None if span is None else list(span) for span in spans],
    }


def _check_layer(
    where: str, layer: Any, stored: str, parts: Mapping[str, Tensor], length: int, batch: int | None
) -> int:
    """Returns the sequences that a layer's tensors are of; PlanError where they are not what such a layer keeps."""
    window = getattr(layer, "sliding_window", None)
    # extents by name: equal names are equal sizes, and some are known beforehand
    sizes = {} if batch is None else {"batch": batch}
    expected: dict[str, tuple[tuple[str, ...], tuple[torch.dtype, ...]]] = {}
    if layer.spans:
        expected["starts"] = ("batch",), (torch.int64,)
    for number, span in enumerate(dict.fromkeys(layer.spans or (None,))):
        prefix = f"{number}." if layer.spans else ""
        heads, count = f"{prefix}heads", f"{prefix}tokens"
        if layer.spans:
            sizes[heads] = layer.spans.count(span)
        if window is None:
            sizes[count] = length if span is None else min(length, sum(span))
        for name, (dtype, extent) in FORMATS[stored].parts.items():
            expected[prefix + name] = ("batch", heads, count, *extent), (dtype,) if dtype else _NUMBERS
        for name in FORMATS[stored].per_sequence:
            expected[prefix + name] = ("batch", heads, "k"), (torch.float32,)
    needed = {name for name in expected if name.rpartition(".")[2] not in FORMATS[stored].per_sequence}
    if not needed <= parts.keys() <= expected.keys():
        raise PlanError(f"has {sorted(parts)!r:.200} in {where}, expected {', '.join(sorted(needed)):.200}")
    for name, tensor in parts.items():
        extents, dtypes = expected[name]
        fits = tensor.ndim == len(extents) and all(
            sizes.setdefault(extent, size) == size > 0 for extent, size in zip(extents, tensor.shape, strict=True)
        )
        if not fits or tensor.dtype not in dtypes:
            shape = ", ".join(str(sizes.get(extent, "any")) for extent in extents)
            raise PlanError(
                f"holds {name} of {where} as {tensor.dtype} {list(tensor.shape)}, expected "
                f"{' or '.join(map(str, dtypes))} [{shape}]"
            )
    if window is not None and not min(length, window - 1) <= sizes["tokens"] <= length:
        raise PlanError(f"holds {sizes['tokens']} tokens in {where}, expected {min(length, window - 1)} to {length}")
    starts = parts.get("starts")
    if starts is not None and not bool(((starts >= 0) & (starts <= length)).all()):
        raise PlanError(
            f"begins its sequences at {starts.tolist()!r:.80} in {where}, expected whole numbers from 0 to {length}"
        )
    return sizes["batch"]
