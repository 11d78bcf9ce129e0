"""Adds the borders of packed documents to a structure, as cumulative lengths or positions that fall back tell them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from adaattn_hf.attention.request import holds_no_memory
from adaattn_hf.attention.structure import CallStructure
from adaattn_hf.attention.tap import tracing


def with_documents(structure: CallStructure, cu_q: Tensor, cu_k: Tensor) -> CallStructure:
    """Returns the structure with document borders: no query sees another document, whatever the mask says.

    Args:
        structure: The rules of the mask.
        cu_q, cu_k: `[documents + 1]` cumulative lengths, starting with 0. Tokens behind the last one are a document of
            their own. Values are checked on the CPU alone: a GPU would have to be waited for.

    Raises:
        ValueError: More than one batch row, or lengths that fall or pass the tokens.
    """
    if structure.batch != 1:
        raise ValueError(
            f"cu_seq_lens_q: packed documents lie in one batch row, got a batch of {structure.batch}; "
            "flatten the batch or leave cu_seq_lens_q out"
        )
    square = structure.q_len == structure.kv_len
    if cu_q is not cu_k and structure.causal and not square:
        raise ValueError(
            "cu_seq_lens_q: causal documents need as many keys as queries, "
            f"got {structure.q_len} and {structure.kv_len}"
        )
    for name, cu, length in (("q", cu_q, structure.q_len), ("k", cu_k, structure.kv_len)):
        if cu.device.type == "cpu" and not tracing():
            _check(f"cu_seq_lens_{name}", cu.tolist(), length)
    q_documents = _numbers(cu_q, structure.q_len)
    k_documents = q_documents if cu_k is cu_q and square else _numbers(cu_k, structure.kv_len)
    if structure.mask is not None or (structure.spans is not None and not square):
        same = q_documents[:, None, :, None] == k_documents[:, None, None, :]
        return structure.with_changes(mask=same if structure.mask is None else structure.mask & same)
    changes: dict[str, Tensor] = {}
    # combine old number and document into one number that still grows along the row
    many = cu_q.shape[0] + 1
    if structure.spans is not None:
        spans = structure.spans.to(k_documents.device)
        changes["spans"] = torch.where(spans >= 0, spans * many + k_documents, spans)
    if structure.k_segments is not None:
        q_known = structure.k_segments if structure.q_segments is None else structure.q_segments
        q_documents = q_known.to(q_documents.device) * many + q_documents
        k_documents = structure.k_segments.to(k_documents.device) * many + k_documents
    return structure.with_changes(q_segments=q_documents, k_segments=k_documents, **changes)


def with_restarts(structure: CallStructure, positions: Tensor) -> CallStructure:
    """Returns the structure with a document border wherever positions fall back; unchanged where none do.

    Positions that stand still or leap ahead are not taken for documents: they have other meanings. Nor are positions
    that nobody can read, in a traced graph or without data.

    Args:
        structure: The rules of the mask.
        positions: `[batch or 1, q_len]` position of each token in its document.
    """
    batch, length = structure.batch, structure.q_len
    square = structure.causal and structure.plain and length == structure.kv_len
    if not square or positions.shape not in ((1, length), (batch, length)):
        return structure
    if tracing() or positions.is_meta or holds_no_memory(positions):
        return structure
    falls = positions.cpu().diff() < 0  # waited for once: documents are read on the host, too
    if not bool(falls.any()):
        return structure
    documents = F.pad(falls.cumsum(1), (1, 0))
    return structure.with_changes(q_segments=documents, k_segments=documents)


def _check(name: str, found: list[int], length: int) -> None:
    if found[:1] != [0] or found != sorted(found) or found[-1] > length:
        shown = found if len(found) < 9 else [*found[:8], "…"]
        raise ValueError(
            f"{name}: got {shown}, expected cumulative lengths of the documents, from 0 to at most {length}, the "
            "tokens of the call; make them with cumsum"
        )


def _numbers(cu: Tensor, length: int) -> Tensor:
    positions = torch.arange(length, device=cu.device, dtype=cu.dtype)
    return torch.searchsorted(cu, positions, right=True)[None]
