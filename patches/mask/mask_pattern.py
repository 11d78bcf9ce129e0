"""Reads masking rules from the mask functions that Transformers composes, without building a dense mask.

`transformers.masking_utils` builds a mask as a function of (batch, head, query, key) by nesting a few of its own
factories. The factories' names and the values that their closures capture say everything that the dense mask would.
A function that is composed in any other way is not guessed at; its dense mask is computed instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils


@dataclass(frozen=True, eq=False)
class MaskPattern:
    """The rules of a mask function.

    Attributes:
        causal: Whether keys after the query are hidden; None if the function does not say.
        window: `W` as in `CallStructure.window`.
        chunk, left_padding: Chunk length and, per batch row, the key index of the first chunk.
        documents: `[batch, length]` document numbers of packed sequences.
        spans: `[batch, length]` numbers of tokens that see one another both ways.
        padding: `[batch, length]`, True for real tokens.
    """

    causal: bool | None = None
    window: int | None = None
    chunk: int | None = None
    left_padding: Tensor | None = None
    documents: Tensor | None = None
    spans: Tensor | None = None
    padding: Tensor | None = None


_CAUSAL, _BOTH_WAYS = MaskPattern(causal=True), MaskPattern(causal=False)


def read_pattern(function: Callable[..., Any]) -> MaskPattern | None:
    """Returns the rules of a mask function, None if it is not composed of Transformers' own factories.

    In a traced graph closures cannot be read; there only the two bare functions are recognised.
    """
    if function is masking_utils.causal_mask_function:
        return _CAUSAL
    if function is masking_utils.bidirectional_mask_function:
        return _BOTH_WAYS
    if torch.compiler.is_compiling():
        return None
    if getattr(function, "__module__", None) != masking_utils.__name__:
        return None
    captured = dict(
        zip(
            function.__code__.co_freevars,
            (cell.cell_contents for cell in function.__closure__ or ()),
            strict=True,
        )
    )
    factory = function.__qualname__.split(".", 1)[0]
    reader = _READERS.get(factory)
    return None if reader is None else reader(captured)


def _merge(patterns: list[MaskPattern | None]) -> MaskPattern | None:
    """Returns the conjunction of patterns, None if one is unknown or two of them disagree about a rule."""
    merged = MaskPattern()
    started = False
    for pattern in patterns:
        if pattern is None:
            return None
        # "causal or same span" combined with further rules is no structure: compute the dense mask
        if merged.spans is not None or (pattern.spans is not None and started):
            return None
        for name, value in vars(pattern).items():
            if value is None:
                continue
            known = getattr(merged, name)
            same = known is value or (not isinstance(value, Tensor) and known == value)
            if known is not None and not same:
                return None
            merged = replace(merged, **{name: value})
        started = True
    return merged


def _read_or(captured: dict[str, Any]) -> MaskPattern | None:
    """Reads "causal, or in the same span", which lets the tokens of an image see one another."""
    parts = [read_pattern(f) for f in captured["mask_functions"]]
    if len(parts) != 2 or any(part is None for part in parts):
        return None
    first, second = parts
    if first is None or second is None:
        return None
    if first.spans is not None:
        first, second = second, first
    alone = MaskPattern(causal=first.causal)
    if vars(first) != vars(alone) or second.spans is None:
        return None
    return replace(first, spans=second.spans)


def _read_packed_positions(captured: dict[str, Any]) -> MaskPattern | None:
    """Reads positions that restart in every document: the rules stay the same, since documents are contiguous."""
    inner = read_pattern(captured["mask_function"])
    return None if inner is None or inner.spans is not None else inner


_READERS: dict[str, Callable[[dict[str, Any]], MaskPattern | None]] = {
    "sliding_window_overlay": lambda c: MaskPattern(window=c["sliding_window"]),
    # here Transformers includes keys at exactly this distance
    "sliding_window_bidirectional_overlay": lambda c: MaskPattern(window=c["sliding_window"] + 1),
    "chunked_overlay": lambda c: MaskPattern(chunk=c["chunk_size"], left_padding=c["left_padding"]),
    "packed_sequence_mask_function": lambda c: MaskPattern(documents=c["packed_sequence_mask"]),
    "remap_positions_for_packed_sequence": _read_packed_positions,
    "padding_mask_function": lambda c: MaskPattern(padding=c["padding_mask"]),
    "blockwise_overlay": lambda c: MaskPattern(spans=c["block_sequence_ids"]),
    "and_masks": lambda c: _merge([read_pattern(f) for f in c["mask_functions"]]),
    "or_masks": _read_or,
}
