"""Documents packed one behind the other, said by `cu_seq_lens_q` and `cu_seq_lens_k`."""

from __future__ import annotations

import torch
from torch import Tensor

from adaattn_hf.structure import CallStructure

__all__ = ["Packed", "with_documents"]


Packed = dict[tuple[int, int], tuple[Tensor, Tensor, CallStructure]]


def with_documents(
    structure: CallStructure, cu_q: Tensor, cu_k: Tensor | None, known: Packed | None = None
) -> CallStructure:
    """The structure with document borders, which always win: no query sees another document.

    Args:
        structure: What the mask says.
        cu_q, cu_k: `[documents + 1]` running sums of lengths, starting with 0; keys default to the queries'
            borders.
        known: What the layers before found for this structure in this forward pass; added to.

    Raises:
        ValueError: More than one batch row.
    """
    cu_k = cu_q if cu_k is None else cu_k
    if structure.batch != 1:
        raise ValueError(
            f"cu_seq_lens_q: packed documents lie in one batch row, got a batch of {structure.batch}; "
            "flatten the batch or leave cu_seq_lens_q out"
        )
    known = {} if known is None else known
    key = (id(cu_q), id(cu_k))
    if key not in known:
        # the tensors are kept so that their identities stay theirs
        known[key] = (cu_q, cu_k, _with_documents(structure, cu_q, cu_k))
    return known[key][2]


def _with_documents(structure: CallStructure, cu_q: Tensor, cu_k: Tensor) -> CallStructure:
    q_documents = _numbers(cu_q, structure.q_len)
    k_documents = _numbers(cu_k, structure.kv_len)
    if structure.k_segments is None and structure.spans is None and structure.mask is None:
        offset = structure.q_offset
        if cu_q is not cu_k and structure.causal and structure.q_len != structure.kv_len:
            raise ValueError(
                "cu_seq_lens_q: causal documents need as many keys as queries, "
                f"got {structure.q_len} and {structure.kv_len}"
            )
        return structure.with_changes(q_segments=q_documents, k_segments=k_documents, q_offset=offset)
    same = q_documents[:, None, :, None] == k_documents[:, None, None, :]
    if structure.mask is None:
        return structure.with_changes(mask=same)
    return structure.with_changes(mask=structure.mask & same)


def _numbers(cu: Tensor, length: int) -> Tensor:
    """`[1, length]`: number of the document that each position belongs to."""
    positions = torch.arange(length, device=cu.device, dtype=cu.dtype)
    return torch.searchsorted(cu, positions, right=True)[None]
