"""Memory of a cache: bytes per token and per sequence, known before it holds a token."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

from .formats import FORMATS
from .groups import Spans


@dataclass(frozen=True)
class CacheMemory:
    """Bytes of a cache.

    Attributes:
        stored: What it keeps, one of `FORMATS`.
        layers: Of each layer that keeps keys and values, or of its heads that keep as many tokens: bytes per token,
            the same in the model's dtype, and the tokens kept at most, None for all.
        per_sequence: Bytes that belong to a sequence as a whole (means, first keys and directions, in fp32).
    """

    stored: str
    layers: tuple[tuple[int, int, int | None], ...]
    per_sequence: int
    streaming: tuple[int, int] = (0, 0)
    """How many key/value heads keep a window by the model's plan, of how many."""

    @property
    def per_token(self) -> int:
        """Bytes of a token in all layers, before windows are passed."""
        return sum(stored for stored, _, _ in self.layers)

    @property
    def smaller(self) -> float:
        """How many times less that is than in the model's dtype."""
        return sum(plain for _, plain, _ in self.layers) / self.per_token

    def predict(self, batch: int, tokens: int) -> int:
        """Bytes of so many sequences of so many tokens, without the spare room that growing layers make (a quarter)."""
        bytes_held = sum(stored * (tokens if limit is None else min(tokens, limit)) for stored, _, limit in self.layers)
        return batch * (bytes_held + self.per_sequence)

    def __str__(self) -> str:
        """One line."""
        form = "in the model's dtype" if self.stored == "model" else f"as {self.stored}, {self.smaller:.2f} times less"
        rest = f", plus {self.per_sequence:,} per sequence" if self.per_sequence else ""
        windowed, heads = self.streaming
        streams = f"; {windowed} of {heads} key/value heads are streaming, and keep a window" if windowed else ""
        return f"{self.per_token:,} bytes per token {form}{rest}{streams}"


def memory_of(cache: Cache, stored: str, spans: Mapping[int, Spans] | None = None) -> CacheMemory:
    """The bytes of a cache that has seen a prompt, on whatever device (`meta`, too); `spans` of streaming heads."""
    all_spans = [span for of_layer in (spans or {}).values() for span in of_layer]
    layers: list[tuple[int, int, int | None]] = []
    per_sequence, fmt = 0, FORMATS[stored]
    layers_of_cache: list[Any] = list(cache.layers)
    for index, layer in enumerate(layers_of_cache):
        if getattr(layer, "keys", None) is None:
            continue
        heads, head_dim = layer.keys.shape[1], layer.keys.shape[3]
        of_token = head_dim, layer.values.shape[3], layer.keys.dtype
        stored_bytes, model_bytes = fmt.token_bytes(*of_token), FORMATS["model"].token_bytes(*of_token)
        window = getattr(layer, "sliding_window", None)
        spans_of_layer = (spans or {}).get(index) if window is None else None
        if spans_of_layer is None:
            layers.append((stored_bytes * heads, model_bytes * heads, None if window is None else window - 1))
        else:
            layers += [(stored_bytes, model_bytes, None if span is None else sum(span)) for span in spans_of_layer]
        per_sequence += len(fmt.per_sequence) * torch.float32.itemsize * heads * head_dim
    windowed = (sum(span is not None for span in all_spans), len(all_spans))
    return CacheMemory(stored, tuple(layers), per_sequence, windowed)
