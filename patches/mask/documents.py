"""Adds to a structure what only keywords tell: documents' borders, keys that a model selects, what a cache dropped."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.attention.tracing import holds_no_memory, tracing


def with_documents(structure: MaskStructure, cu_q: Tensor, cu_k: Tensor | None, cut: int = 0) -> MaskStructure:
    """Returns the structure with document borders: no query sees another document, whatever the mask says.

    Tokens of a cache belong to all documents if the lengths of queries and keys are equal, else to the first one, whose
    keys are then so many more. Lengths are cumulative, `[documents + 1]`; tokens behind the last are a document of
    their own. Without `cu_k` keys have the lengths of queries. A ValueError for several batch rows, or lengths that
    fall, pass the tokens or do not fit; they are checked on the CPU alone: a GPU would have to be waited for. `cut`
    first tokens that `cu_q` counts have no queries in this layer.
    """
    cu_k = cu_q if cu_k is None else cu_k
    if structure.batch != 1:
        raise ValueError(
            f"cu_seq_lens_q: packed documents lie in one batch row, got a batch of {structure.batch}; "
            "flatten the batch or leave cu_seq_lens_q out"
        )
    tokens, look = cut + structure.q_len, not tracing() and cu_q.is_cpu and cu_k.is_cpu
    past = (structure.offset() if look else structure.q_offset) - cut
    behind = not (type(past) is int and past == 0)
    _check("cu_seq_lens_q", cu_q, tokens)
    _check("cu_seq_lens_k", cu_k, structure.kv_len, cut_off=behind and structure.window is not None)
    fit = cu_q.shape == cu_k.shape
    equal = cu_q is cu_k or (fit and look and torch.equal(cu_q, cu_k))
    if fit and look and not equal and (structure.causal or past):
        more = (cu_k - cu_q)[1:]  # a layer with a window may have lost some of the cache
        lost = past and structure.window is not None
        fit = bool((more == more[0]).all()) and bool(more[0] >= past if lost else more[0] == past)
    if not fit:
        cus = [cu.tolist() if look and cu.shape[0] < 9 else f"{cu.shape[0] - 1} documents" for cu in (cu_q, cu_k)]
        raise ValueError(
            f"cu_seq_lens_k: got {cus[1]} for cu_seq_lens_q {cus[0]}, expected the same, if all documents see what "
            f"a cache holds, or the same with its tokens ({past}) added to all but the 0, if the first one does"
        )
    if equal and type(past) is int and past and (structure.windowed or structure.chunk is not None):
        raise ValueError(
            "cu_seq_lens_q: got documents that all continue what a cache holds, expected a layer without a window or "
            "chunks, which count tokens along the row; run the documents one by one, each with a copy of the cache"
        )
    q_documents, square = _numbers(cu_q, tokens)[:, cut:], structure.q_len == structure.kv_len
    if behind:
        k_documents = _numbers(cu_q, structure.kv_len, past)
        k_documents = torch.where((cu_q == cu_k).all(), k_documents, k_documents.clamp(min=1))
    else:
        k_documents = q_documents if cu_k is cu_q and square else _numbers(cu_k, structure.kv_len)
    if behind or structure.mask is not None or (structure.spans is not None and not square):
        keys = k_documents[:, None, None, :]
        same = (q_documents[:, None, :, None] == keys) | (keys == 0)
        return structure.with_changes(mask=same if structure.mask is None else structure.mask & same)
    changes: dict[str, Tensor] = {}
    # combine old number and document into one number that still grows along the row
    many = cu_q.shape[0] + 1
    if structure.spans is not None:
        spans = structure.spans.to(k_documents.device)
        changes["spans"] = torch.where(spans >= 0, spans * many + k_documents, spans)
    if structure.k_segments is not None:
        numbers = structure.k_segments if structure.q_segments is None else structure.q_segments
        q_documents = numbers.to(q_documents.device) * many + q_documents
        k_documents = structure.k_segments.to(k_documents.device) * many + k_documents
    return structure.with_changes(q_segments=q_documents, k_segments=k_documents, **changes)


def with_restarts(structure: MaskStructure, positions: Tensor) -> MaskStructure:
    """Returns the structure with a document border wherever positions `[batch or 1, q_len]` fall back.

    Positions that stand still or leap ahead are not taken for documents: they have other meanings. Nor are positions
    that nobody can read, in a traced graph or without data.
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


def with_dropped(structure: MaskStructure, positions: Any) -> MaskStructure:
    """Returns the structure of a layer with a window, whose cache has dropped what `[batch, q_len]` positions count."""
    if not isinstance(positions, Tensor) or positions.dim() != 2:
        return structure
    return structure.with_changes(dropped=(positions[:, -1] - structure.kv_len + 1).clamp_min(0))


def with_selected_keys(
    module: nn.Module, structure: MaskStructure, heads: int, kwargs: Mapping[str, Any]
) -> MaskStructure:
    """Returns the structure restricted to keys that the model selects by an indexer (DeepSeek sparse attention).

    For Transformers' `eager` and `sdpa` such models mask the other keys themselves; all other implementations get
    `indices` `[batch, q_len, top_k]`, or `block_indices` `[batch, groups, q_len, top_k]` of each group of heads, whose
    size of blocks the module's indexer has. Negative entries select nothing.
    """
    indices, blocks, size, length = kwargs.get("indices"), kwargs.get("block_indices"), 1, structure.kv_len
    if blocks is not None:
        indexer: Any = module.indexer
        indices, size = blocks, indexer.block_size
    if indices is None:
        return structure
    blocks_of_keys, index = -(-length // size), indices.long()
    index = index.masked_fill((index < 0) | (index >= blocks_of_keys), blocks_of_keys)
    nothing = torch.zeros((*index.shape[:-1], blocks_of_keys + 1), dtype=torch.bool, device=index.device)
    keep = nothing.scatter(-1, index, True)[..., :blocks_of_keys]
    if blocks is None:
        keep = keep[:, None]
    else:
        keep = keep.repeat_interleave(size, dim=-1)[..., :length].repeat_interleave(heads // keep.shape[1], dim=1)
    return structure.with_changes(mask=keep if structure.mask is None else structure.mask & keep)


def _check(name: str, cu: Tensor, tokens: int, cut_off: bool = False) -> None:
    kind = cu.ndim != 1 or cu.is_floating_point() or cu.dtype is torch.bool or cu.shape[0] < 2
    sums = [] if kind or tracing() or not cu.is_cpu else cu.tolist()
    if kind or (sums and (sums[0] != 0 or sums != sorted(sums) or (sums[-1] > tokens and not cut_off))):
        value = f"{cu.dtype}, shape {tuple(cu.shape)}" if kind else sums if len(sums) < 9 else [*sums[:8], "…"]
        raise ValueError(
            f"{name}: got {value}, expected cumulative lengths of the documents, integers from 0 to at most {tokens}, "
            "the tokens of the call; make them with cumsum"
        )


def _numbers(cu: Tensor, length: int, past: int | Tensor = 0) -> Tensor:
    # of each position's document `[1, length]`, from 1; 0 for the first `past` positions
    positions = torch.arange(length, device=cu.device, dtype=cu.dtype) - past
    return torch.searchsorted(cu, positions, right=True)[None]
