"""Reads masking rules from the mask functions that Transformers composes, without building a dense mask.

`transformers.masking_utils` builds a mask as a function of (batch, head, query, key) by nesting a few of its own
factories. The factories' names and the values that their closures capture say everything that the dense mask would.
A function that is composed in any other way is not guessed at; its dense mask is computed instead.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

MaskFields = dict[str, Any]
"""What a mask function says, by fields of `MaskStructure`: `causal`, `window`, `chunk`, `chunk_start`, `k_segments`,
`spans`; and `key_padding` where a function hides it itself. Positions are those of the whole sequence."""


def causality(function: Callable[..., Any]) -> bool | None:
    """True for the bare causal mask function, False for the bare bidirectional one, None for all others."""
    # compared one by one: before torch 2.13 tracers cannot use functions as dictionary keys
    if function is masking_utils.causal_mask_function:
        return True
    return False if function is masking_utils.bidirectional_mask_function else None


def read_pattern(function: Callable[..., Any]) -> MaskFields | None:
    """Returns the rules of a mask function, None if it is not composed of Transformers' own factories.

    In a traced graph closures cannot be read; there only the two bare functions are recognised.
    """
    if (bare := causality(function)) is not None:
        return {"causal": bare}
    if torch.compiler.is_compiling() or getattr(function, "__module__", None) != masking_utils.__name__:
        return None
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    captured = dict(zip(function.__code__.co_freevars, cells, strict=True))
    reader = _READERS.get(function.__qualname__.split(".", 1)[0])
    return None if reader is None else reader(captured)


def _all_of(captured: dict[str, Any]) -> MaskFields | None:
    merged: MaskFields = {}  # None if a part is unknown or two of them disagree about a rule
    for rules in map(read_pattern, captured["mask_functions"]):
        # "causal or same span" combined with further rules is no structure: compute the dense mask
        if rules is None or "spans" in merged or ("spans" in rules and merged):
            return None
        for name, value in rules.items():
            first = merged.setdefault(name, value)
            if first is not value and (isinstance(value, Tensor) or first != value):
                return None
    return merged


def _any_of(captured: dict[str, Any]) -> MaskFields | None:
    # "causal, or in the same span", which lets the tokens of an image see one another
    parts = [read_pattern(function) for function in captured["mask_functions"]]
    read = [rules for rules in parts if rules is not None]
    if not len(parts) == len(read) == 2 or sorted([*read[0], *read[1]]) != ["causal", "spans"]:
        return None
    return read[0] | read[1]


def _packed_positions(captured: dict[str, Any]) -> MaskFields | None:
    inner = read_pattern(captured["mask_function"])  # documents are contiguous, so that restarts change no rule
    if inner is None or "spans" in inner:
        return None
    if "chunk" in inner:  # by positions, while a structure's count from a document's first key
        positions = captured["position_ids"]
        begins = torch.nn.functional.pad(positions.diff() != 1, (1, 0), value=True)
        if (positions[begins] % inner["chunk"]).any():
            return None
    return inner


_READERS: dict[str, Callable[[dict[str, Any]], MaskFields | None]] = {
    "sliding_window_overlay": lambda c: {"window": c["sliding_window"]},
    # here Transformers includes keys at exactly this distance
    "sliding_window_bidirectional_overlay": lambda c: {"window": c["sliding_window"] + 1},
    "chunked_overlay": lambda c: {"chunk": c["chunk_size"], "chunk_start": c["left_padding"]},
    "packed_sequence_mask_function": lambda c: {"k_segments": c["packed_sequence_mask"]},
    "remap_positions_for_packed_sequence": _packed_positions,
    "padding_mask_function": lambda c: {"key_padding": c["padding_mask"]},
    "blockwise_overlay": lambda c: {"spans": c["block_sequence_ids"]},
    "and_masks": _all_of,
    "or_masks": _any_of,
}
