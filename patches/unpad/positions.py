"""The position ids that a model assigns to a padded batch when the caller passes none.

Packed tokens must keep these, so they are computed on the padded form and packed along with the tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

PositionRule = Callable[[Tensor | None, Tensor, Tensor], Tensor]
"""(`input_ids` or None, 2-D mask, a tensor on the device) -> position ids `[batch or 1, length]`."""

# Model types that number the real tokens; others number the columns.
_COUNT_MASK = ("opt", "biogpt")


def _columns(input_ids: Tensor | None, mask: Tensor, like: Tensor) -> Tensor:
    return torch.arange(mask.shape[1], device=like.device)[None]


def _real_tokens(input_ids: Tensor | None, mask: Tensor, like: Tensor) -> Tensor:
    real = mask.long().to(like.device)
    return real.cumsum(dim=1) * real - 1


def _after_padding_index(
    input_ids: Tensor | None, mask: Tensor, like: Tensor, *, padding_index: int
) -> Tensor:
    """RoBERTa's rule: real tokens are numbered from `padding_index + 1`, padding gets `padding_index`."""
    if input_ids is None:
        return _columns(None, mask, like) + padding_index + 1
    real = input_ids.ne(padding_index).long()
    return real.cumsum(dim=1) * real + padding_index


def position_rule(trunk: nn.Module, config: Any) -> PositionRule:
    """The rule by which this model numbers positions."""
    for module in trunk.modules():
        if hasattr(module, "create_position_ids_from_inputs_embeds") and "padding_idx" in vars(module):
            # no closure, which could not be pickled with the model
            return functools.partial(_after_padding_index, padding_index=int(vars(module)["padding_idx"]))
    return _real_tokens if getattr(config, "model_type", "") in _COUNT_MASK else _columns
