"""Adds the borders of packed documents that positions tell to a structure."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from adaattn_hf.attention.request import holds_no_memory
from adaattn_hf.attention.structure import CallStructure
from adaattn_hf.attention.tap import tracing

from .documents import Packed


def with_restarts(structure: CallStructure, positions: Tensor, known: Packed | None = None) -> CallStructure:
    """Returns the structure with a document border wherever positions fall back; unchanged where none do.

    Positions that stand still or leap ahead are not taken for documents: they have other meanings. Nor are positions
    that nobody can read, in a traced graph or without data.

    Args:
        structure: The rules of the mask.
        positions: `[batch or 1, q_len]` position of each token in its document.
        known: Results of earlier layers of this forward pass; the new one is added.
    """
    batch, length = structure.batch, structure.q_len
    square = structure.causal and structure.plain and length == structure.kv_len
    if not square or positions.shape not in ((1, length), (batch, length)):
        return structure
    if tracing() or positions.is_meta or holds_no_memory(positions):
        return structure
    known = {} if known is None else known
    key = (id(positions), 0)
    if key not in known:
        falls = positions.diff() < 0
        found = structure
        if bool(falls.any()):
            documents = F.pad(falls.cumsum(1), (1, 0))
            found = structure.with_changes(q_segments=documents, k_segments=documents)
        known[key] = (positions, positions, found)
    return known[key][2]
