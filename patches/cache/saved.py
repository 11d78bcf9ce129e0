"""What the tensors of a saved layer must be, by the layer that they are for: a file is checked, not believed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .tokens import BESIDE, PARTS, value_width

NUMBERS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_EXTENTS = {
    "keys": "bhnk", "values": "bhnv", "key_codes": "bhnk", "key_scale": "bhn", "value_codes": "bhnv",
    "value_scale": "bhn", "mean": "bhk", "first": "bhk", "along": "bhk",
}  # fmt: skip
"""Of each tensor: batch, heads, number of tokens, channels of keys and of values; equal letters are equal sizes."""


class Unsound(ValueError):
    """A file is no cache for this model; what is wrong with it, to be said of its path."""


def check_layer(
    where: str, layer: Any, stored: str, held: Mapping[str, Tensor], length: int, batch: int | None
) -> int:
    """Returns the sequences that a layer's tensors are of.

    Args:
        where: The layer, in words.
        layer: An empty one, which they shall fill.
        stored: How the cache keeps them.
        held: The tensors by name, as saved.
        length: Tokens that the layer has seen.
        batch: Sequences of the layers before, None for the first.

    Raises:
        Unsound: A tensor lacks or is too many, or has another dtype or shape than such a layer keeps.
    """
    spans = getattr(layer, "spans", None)
    if spans is None:
        window = getattr(layer, "sliding_window", None)
        least = length if window is None else min(length, window - 1)
        return _check(where, stored, held, (least, length), {} if batch is None else {"b": batch})["b"]
    groups = list(dict.fromkeys(spans))
    starts = held.get("starts")
    stray = [
        name
        for name in held
        if name != "starts" and name.partition(".")[0] not in map(str, range(len(groups)))
    ]
    if starts is None or stray:
        raise Unsound(
            f"has {sorted(held)!r:.200} in {where}, expected starts and tensors of {len(groups)} groups"
        )
    sizes: dict[str, int] = {} if batch is None else {"b": batch}
    for number, span in enumerate(groups):
        prefix = f"{number}."
        own = {name.removeprefix(prefix): tensor for name, tensor in held.items() if name.startswith(prefix)}
        count = length if span is None else min(length, sum(span))
        heads = {"h": spans.count(span)}
        found = _check(f"{where}, group {number}", stored, own, (count, count), sizes | heads)
        sizes = {letter: found[letter] for letter in "bkv"}
    inside = starts.dtype is torch.int64 and bool(((starts >= 0) & (starts <= length)).all())
    if not inside or starts.shape != (sizes["b"],):
        raise Unsound(
            f"begins its sequences at {starts.tolist()!r:.80} in {where}, expected {sizes['b']} whole numbers from "
            f"0 to {length}"
        )
    return sizes["b"]


def _check(
    where: str,
    stored: str,
    held: Mapping[str, Tensor],
    counts: tuple[int, int],
    sizes: Mapping[str, int],
) -> dict[str, int]:
    """Returns the extents of tensors, which must hold `counts` tokens, from least to most, and agree in `sizes`."""
    needed = {"keys", "values"} if stored == "model" else set(PARTS)
    beside = set() if stored == "model" else set(BESIDE)
    if not needed <= set(held) <= needed | beside:
        raise Unsound(f"has {sorted(held)!r:.200} in {where}, expected {', '.join(sorted(needed))}")
    known = dict(sizes)
    for name, tensor in held.items():
        letters, dtypes = _EXTENTS[name], _dtypes(name, stored)
        shape = dict(zip(letters, tensor.shape, strict=False))
        fits = tensor.ndim == len(letters) and all(known.setdefault(c, n) == n > 0 for c, n in shape.items())
        if not fits or tensor.dtype not in dtypes:
            expected = ", ".join(str(known.get(letter, "any")) for letter in letters)
            raise Unsound(
                f"holds {name} of {where} as {tensor.dtype} {list(tensor.shape)}, expected "
                f"{' or '.join(map(str, dtypes))} [{expected}]"
            )
    if not counts[0] <= known["n"] <= counts[1]:
        raise Unsound(
            f"holds {known['n']} tokens in {where}, expected {' to '.join(map(str, sorted(set(counts))))}"
        )
    return known


def _dtypes(name: str, stored: str) -> tuple[torch.dtype, ...]:
    if name in ("keys", "values"):
        return NUMBERS
    if name.endswith("_scale"):
        return (torch.uint8,)
    if name == "key_codes":
        return (torch.int8,)
    return (value_width(stored, 2)[0],) if name == "value_codes" else (torch.float32,)
