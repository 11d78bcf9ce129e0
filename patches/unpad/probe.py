"""A small batch run both ways, before a model is trusted to run without its padding.

Reasons found in the configuration cannot be complete: a model may mix tokens by means that no attribute
tells. So every model proves itself on a ragged batch first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .hooks import Unpadding

__all__ = ["probe"]

# Relative to the largest value. A token that sees another document, or stands at another position, is off by
# far more.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
_HALF_TOLERANCE = 0.05


def probe(unpadding: Unpadding) -> tuple[str, ...]:
    """What differs between both forms of one ragged batch; empty if nothing does.

    The model's modes, its random state and the counts of calls are as before.
    """
    target = unpadding.top if unpadding.token_wise else unpadding.trunk
    embeddings: Any = target.get_input_embeddings()  # type: ignore[operator]
    weight = embeddings.weight
    ids = _token_ids(embeddings.num_embeddings, getattr(unpadding.config, "pad_token_id", None)).to(
        weight.device
    )
    last = [1] * 5 + [0] * 2 if unpadding.pools_first else [0] * 2 + [1] * 5
    mask = torch.tensor([[1] * 7, [1] * 3 + [0] * 4, last], device=weight.device)
    training = {module: module.training for module in target.modules()}
    calls = unpadding.calls.copy()
    target.eval()
    try:
        with torch.no_grad():
            keywords = {"use_cache": False} if "past_key_values" in unpadding.trunk_parameters else {}
            unpadding.enabled = False
            padded = target(input_ids=ids, attention_mask=mask, **keywords)
            unpadding.enabled = True
            packed = target(input_ids=ids, attention_mask=mask, **keywords)
    finally:
        unpadding.enabled = True
        for module, was in training.items():
            module.training = was
        unpadding.calls = calls
    return tuple(
        f"{name} of a test batch differs by {difference:.1e} of its largest value with and without padding"
        for name, difference in _differences(padded, packed, mask)
    )


def _token_ids(vocabulary: int, pad_token: int | None) -> Tensor:
    """`[3, 7]` distinct tokens, spread over the vocabulary, none of them the padding token."""
    ids = torch.linspace(0, vocabulary - 1, 23, device="cpu").long()
    ids = ids[ids != pad_token] if pad_token is not None else ids
    return ids.repeat(22)[:21].view(3, 7)


def _differences(padded: Any, packed: Any, mask: Tensor) -> list[tuple[str, float]]:
    found = []
    for name, expected in padded.items():
        actual = packed.get(name)
        if not isinstance(expected, Tensor) or not expected.is_floating_point():
            continue
        if not isinstance(actual, Tensor) or actual.shape != expected.shape:
            found.append((name, float("inf")))
            continue
        bound = _TOLERANCE.get(expected.dtype, _HALF_TOLERANCE)
        difference, scale = (actual - expected).abs(), expected.abs().max().clamp_min(1e-30)
        if expected.shape[:2] == mask.shape:
            difference = torch.where(mask.bool()[..., None], difference, actual.abs())
        relative = float(difference.max() / scale)
        if not relative <= bound:
            found.append((name, relative))
    return found
