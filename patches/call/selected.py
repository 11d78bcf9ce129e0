"""Sparse attention whose keys the model selects itself, per query, by an indexer (DeepSeek sparse attention).

For Transformers' `eager` and `sdpa` such models mask the other keys themselves; all other implementations get the
selection as a keyword. Here it becomes part of the structure's mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from adaattn_hf.attention.structure import CallStructure


def with_selected_keys(
    module: nn.Module, structure: CallStructure, heads: int, kwargs: dict[str, Any]
) -> CallStructure:
    """Returns the structure restricted to the selected keys, unchanged if no selection was passed.

    Args:
        module: The attention module, whose indexer has the block size.
        structure: The rules of the mask.
        heads: Number of query heads.
        kwargs: May hold `indices` `[batch, q_len, top_k]`, the selected keys of each query, or
            `block_indices` `[batch, groups, q_len, top_k]`, the selected blocks of keys of each query and
            group of heads. Negative entries select nothing.
    """
    keep: Tensor | None = None
    indices, blocks = kwargs.get("indices"), kwargs.get("block_indices")
    if indices is not None:
        keep = _scattered(indices, structure.kv_len)[:, None]
    if blocks is not None:
        indexer: Any = module.indexer
        size: int = indexer.block_size
        count = -(-structure.kv_len // size)
        chosen = _scattered(blocks, count).repeat_interleave(size, dim=-1)[..., : structure.kv_len]
        keep = chosen.repeat_interleave(heads // chosen.shape[1], dim=1)
    if keep is None:
        return structure
    return structure.with_changes(mask=keep if structure.mask is None else structure.mask & keep)


def _scattered(indices: Tensor, length: int) -> Tensor:
    """Turns indices `[…, top_k]` into a boolean `[…, length]` that is True at every index."""
    index = indices.long()
    index = index.masked_fill((index < 0) | (index >= length), length)
    found = torch.zeros((*index.shape[:-1], length + 1), dtype=torch.bool, device=index.device)
    return found.scatter(-1, index, True)[..., :length]
