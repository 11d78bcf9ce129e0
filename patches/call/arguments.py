"""What the arguments of a call mean: the dtype to compute in, masks of every form, packed documents, selected keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from adaattn_hf.attention.call import check_dtype
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.attention.tracing import any_autocast, transient

from ..mask.structured_mask import StructuredMask, maskless, recall, store_structure


def one_dtype(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns query, key and value in one dtype: autocast's where it is on, else the widest of the three.

    Under autocast, rotary embeddings return fp32 queries and keys beside half-precision values; GPT-2 can ask for fp32.
    Autocast leaves fp64 alone.
    """
    dtype = query.dtype
    # a setting of GPT-2, read from `__dict__` because a failing `Module.__getattr__` is slow
    upcasts = module.__dict__.get("reorder_and_upcast_attn")
    casts = any_autocast() and _autocasts(query.device.type)
    casts = casts and torch.float64 not in (dtype, key.dtype, value.dtype)
    if not (casts or upcasts) and dtype is key.dtype is value.dtype:
        return query, key, value
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_dtype(name, tensor)
    if casts:
        dtype = torch.get_autocast_dtype(query.device.type)
    else:
        dtype = torch.promote_types(torch.promote_types(dtype, key.dtype), value.dtype)
    if upcasts:
        dtype = torch.promote_types(dtype, torch.float32)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def restored(out: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the output contiguous, in the query's dtype; under autocast in autocast's, as stock attention does."""
    if out.dtype is not dtype and not _autocasts(out.device.type):
        out = out.to(dtype)
    return out.contiguous()


def _autocasts(device: str) -> bool:
    """Whether autocast is on for a device; the meta device, which `explain` uses, has no autocast."""
    return device != "meta" and torch.is_autocast_enabled(device)


def read_mask(
    module: nn.Module, q_shape: torch.Size, k_shape: torch.Size, attention_mask: Any, is_causal: bool | None
) -> tuple[MaskStructure, Tensor | None]:
    """The structure and additive bias that a mask stands for; TypeError for no mask, ValueError for other shapes."""
    batch, heads, q_len, _ = q_shape
    kv_len = k_shape[2]
    if isinstance(attention_mask, StructuredMask):
        structure = attention_mask.structure
        if structure.batch != batch:
            structure = structure.expanded(batch)
        if structure.q_len == q_len and structure.kv_len == kv_len:
            return structure, None
        if structure.q_len != q_len or not _hides_nothing(structure):
            raise ValueError(
                f"attention_mask: made for {structure.q_len} queries and {structure.kv_len} keys, got "
                f"{q_len} queries and {kv_len} keys in {type(module).__name__}; pass the mask of this call. Layers "
                "of a cache that hold unequal numbers of tokens are read by one query at a time, without padding"
            )
        # made for the first layer of a cache whose layers hold unequal numbers of tokens
        attention_mask, is_causal = None, False
    if attention_mask is None:
        call = maskless(module, q_shape, k_shape, is_causal)
        if transient():
            return MaskStructure(*call), None
        return recall(call) or store_structure(call, MaskStructure(*call)), None
    if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
        if attention_mask.shape[0] not in (1, batch) or attention_mask.shape[1] < kv_len:
            raise ValueError(
                f"attention_mask: got shape {tuple(attention_mask.shape)}, expected [{batch}, {kv_len}] or more columns"
            )
        # flash-attn takes such masks, and causality beside them: there the last query stands at the last key
        causal = maskless(module, q_shape, k_shape, is_causal)[3]
        padding = attention_mask.bool()[:, attention_mask.shape[1] - kv_len :].expand(batch, -1)
        offset = kv_len - q_len if causal else 0
        return MaskStructure(batch, q_len, kv_len, causal, offset, key_padding=padding), None
    from .refusals import check_dense

    check_dense(module, attention_mask, (batch, heads, q_len, kv_len))
    mask: Tensor = attention_mask
    if mask.dtype.is_floating_point:
        return MaskStructure(batch, q_len, kv_len), mask
    return MaskStructure(batch, q_len, kv_len, mask=mask.bool()), None


def _hides_nothing(structure: MaskStructure) -> bool:
    known = structure if torch.compiler.is_compiling() else structure.simplified()
    if not known.plain or known.windowed:
        return False
    return not known.causal or (known.q_len == 1 and known.offset() >= known.kv_len - 1)


def with_keywords(
    module: nn.Module, structure: MaskStructure, attention_mask: Any, heads: int, kwargs: Mapping[str, Any]
) -> MaskStructure:
    """Returns the structure with what keywords add to it: packed documents and selected keys.

    ValueError: keys lie in a paged cache, or documents come too late to move the chunks of a compiled graph.
    """
    from ..mask.documents import with_documents
    from .refusals import check_paged, check_square

    check_paged(module, kwargs)
    mask = attention_mask if isinstance(attention_mask, StructuredMask) else None
    if (cu_q := kwargs.get("cu_seq_lens_q")) is not None:
        if mask is not None and mask.fixed_chunks:
            raise ValueError(
                "cu_seq_lens_q: got packed documents beside an attention_mask in a compiled graph of a model with "
                f"chunked attention ({type(module).__name__}), whose chunks then count from the row's first key and "
                "not from each document's; leave the attention_mask out and pass position_ids, or run the model "
                "without torch.compile"
            )
        cu_k = kwargs.get("cu_seq_lens_k")
        cu_k = cu_q if cu_k is None else cu_k
        if isinstance(attention_mask, Tensor) and attention_mask.ndim == 4:
            check_square(structure)
        structure = with_documents(structure, cu_q, cu_k) if mask is None else mask.packed(structure, cu_q, cu_k)
    return with_selected_keys(module, structure, heads, kwargs)


def with_selected_keys(
    module: nn.Module, structure: MaskStructure, heads: int, kwargs: Mapping[str, Any]
) -> MaskStructure:
    """Returns the structure restricted to keys that the model selects by an indexer (DeepSeek sparse attention).

    For Transformers' `eager` and `sdpa` such models mask the other keys themselves; all other implementations get
    `indices` `[batch, q_len, top_k]`, or `block_indices` `[batch, groups, q_len, top_k]` of each group of heads, whose
    size of blocks the module's indexer has. Negative entries select nothing.
    """
    indices, blocks = kwargs.get("indices"), kwargs.get("block_indices")
    if blocks is not None:
        indexer: Any = module.indexer
        size: int = indexer.block_size
        chosen = _scattered(blocks, -(-structure.kv_len // size)).repeat_interleave(size, dim=-1)
        keep = chosen[..., : structure.kv_len].repeat_interleave(heads // chosen.shape[1], dim=1)
    elif indices is not None:
        keep = _scattered(indices, structure.kv_len)[:, None]
    else:
        return structure
    return structure.with_changes(mask=keep if structure.mask is None else structure.mask & keep)


def _scattered(indices: Tensor, length: int) -> Tensor:
    index = indices.long()
    index = index.masked_fill((index < 0) | (index >= length), length)
    found = torch.zeros((*index.shape[:-1], length + 1), dtype=torch.bool, device=index.device)
    return found.scatter(-1, index, True)[..., :length]
