"""Adds the borders of packed documents that `cu_seq_lens_q` and `cu_seq_lens_k` tell to a structure."""

from __future__ import annotations

import torch
from torch import Tensor

from adaattn_hf.attention.structure import CallStructure
from adaattn_hf.attention.tap import tracing

Packed = dict[tuple[int, int], tuple[Tensor, Tensor, CallStructure]]


def with_documents(
    structure: CallStructure, cu_q: Tensor, cu_k: Tensor | None, known: Packed | None = None
) -> CallStructure:
    """Returns the structure with document borders: no query sees another document, whatever the mask says.

    Args:
        structure: The rules of the mask.
        cu_q, cu_k: `[documents + 1]` cumulative lengths, starting with 0; `cu_k` defaults to `cu_q`. Tokens
            behind the last one are a document of their own. Values are checked on the CPU alone: a GPU would have to
            be waited for.
        known: Results of earlier layers of this forward pass; the new one is added.

    Raises:
        ValueError: More than one batch row, or lengths that fall or pass the tokens.
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
    k_documents = _numbers(cu_k, structure.kv_len)
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


def _check(name: str, found: list[int], length: int) -> None:
    if found[:1] != [0] or found != sorted(found) or found[-1] > length:
        shown = found if len(found) < 9 else [*found[:8], "…"]
        raise ValueError(
            f"{name}: got {shown}, expected cumulative lengths of the documents, from 0 to at most {length}, the "
            "tokens of the call; make them with cumsum"
        )


def _numbers(cu: Tensor, length: int) -> Tensor:
    """Returns `[1, length]`, the number of each position's document."""
    positions = torch.arange(length, device=cu.device, dtype=cu.dtype)
    return torch.searchsorted(cu, positions, right=True)[None]
