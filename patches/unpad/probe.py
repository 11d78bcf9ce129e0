"""Tests on a small ragged batch that a model computes the same with and without padding.

The configuration cannot tell everything: a model may mix tokens in ways that no attribute shows. So every model must
pass this test before its padding is removed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .hooks import Unpadding

# Relative to the largest value; a token at a wrong position, or one that sees another row, is off by far more.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
_HALF_TOLERANCE = 0.05


def probe(unpadding: Unpadding) -> tuple[str, ...]:
    """The outputs that differ between the padded and the packed form of a ragged batch; empty if none do.

    The hooks are registered meanwhile, for the packed form. Training modes and the random state are restored.
    """
    target = unpadding.top if unpadding.token_wise else unpadding.trunk
    embeddings: Any = target.get_input_embeddings()  # type: ignore[operator]
    # tensors for offloaded weights are sent where they belong by accelerate's hooks
    device = "cpu" if embeddings.weight.is_meta else embeddings.weight.device
    ids = _token_ids(embeddings.num_embeddings, getattr(unpadding.config, "pad_token_id", None)).to(device)
    last = [1] * 5 + [0] * 2 if unpadding.pools == "first" else [0] * 2 + [1] * 5
    mask = torch.tensor([[1] * 7, [1] * 3 + [0] * 4, last], dtype=torch.int64, device=device)
    pools, unpadding.pools = unpadding.pools, ""  # all tokens of the base model, whatever its head reads
    training = {module: module.training for module in target.modules()}
    target.eval()
    try:
        with torch.no_grad():
            keywords = {"use_cache": False} if unpadding.takes_cache else {}
            padded = target(input_ids=ids, attention_mask=mask, **keywords)
            unpadding.install()
            packed = target(input_ids=ids, attention_mask=mask, **keywords)
    finally:
        unpadding.remove()
        unpadding.pools = pools
        for module, was in training.items():
            module.training = was
        unpadding.calls.clear()
    return tuple(
        f"{name} of a test batch differs by {difference:.1e} of its largest value with and without padding"
        for name, difference in _differences(padded, packed, mask)
    )


def _token_ids(vocabulary: int, pad_token: int | None) -> Tensor:
    ids = torch.linspace(0, vocabulary - 1, 23, dtype=torch.float32, device="cpu").long()
    ids = ids[ids != pad_token] if pad_token is not None else ids
    return ids.repeat(22)[:21].view(3, 7)


def _differences(padded: Any, packed: Any, mask: Tensor) -> list[tuple[str, float]]:
    differing = []
    for name, expected in padded.items():
        actual = packed.get(name)
        if not isinstance(expected, Tensor) or not expected.is_floating_point():
            continue
        if not isinstance(actual, Tensor) or actual.shape != expected.shape:
            differing.append((name, float("inf")))
            continue
        bound = _TOLERANCE.get(expected.dtype, _HALF_TOLERANCE)
        difference, scale = (actual - expected).abs(), expected.abs().max().clamp_min(1e-30)
        if expected.shape[:2] == mask.shape:
            difference = torch.where(mask.bool()[..., None], difference, actual.abs())
        relative = float(difference.max() / scale)
        if not relative <= bound:
            differing.append((name, relative))
    return differing
