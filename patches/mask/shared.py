"""Structures without tensors: calls of like shape share one, and with it all that was derived from it."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import nn

from adaattn_hf.attention.structure import CallStructure

MOST = 64
"""Most structures that are kept; every step of a decode adds one, since its keys are one more."""

_structures: dict[Hashable, CallStructure] = {}

recall = _structures.get


def remember(key: Hashable, structure: CallStructure) -> CallStructure:
    """Keeps a structure under a key that holds everything it was made from, and returns it."""
    if len(_structures) >= MOST:
        _structures.clear()
    _structures[key] = structure
    return structure


def maskless(
    module: nn.Module, q_shape: torch.Size, k_shape: torch.Size, is_causal: bool | None
) -> tuple[int, int, int, bool]:
    """Returns batch, query length, key length and causality of a call without a mask.

    As in stock attention, causality then counts from the first key, and a single query sees all keys.
    """
    batch, _, q_len, _ = q_shape
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", False)
    return batch, q_len, k_shape[2], bool(causal) and q_len > 1
