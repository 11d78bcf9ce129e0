"""Reads what Transformers hands an attention function: masks and keywords become a structure, the rest is refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from adaattn_hf.attention.structure import CallStructure
from adaattn_hf.attention.tap import transient

from ..mask.shared import maskless, recall, remember
from ..mask.structured_mask import StructuredMask


def with_keywords(
    module: nn.Module, structure: CallStructure, attention_mask: Any, query: Tensor, kwargs: dict[str, Any]
) -> CallStructure:
    """Returns the structure with what keywords add to it: packed documents and selected keys.

    Raises:
        ValueError: The keys lie in a paged cache.
    """
    from ..mask.documents import with_documents
    from ..mask.packing import with_restarts
    from .refusals import check_paged
    from .selected import with_selected_keys

    check_paged(module, kwargs)
    packed = attention_mask.packed if isinstance(attention_mask, StructuredMask) else None
    if kwargs.get("cu_seq_lens_q") is not None:
        structure = with_documents(structure, kwargs["cu_seq_lens_q"], kwargs.get("cu_seq_lens_k"), packed)
    elif packed is not None and attention_mask.by_positions and kwargs.get("position_ids") is not None:
        structure = with_restarts(structure, kwargs["position_ids"], packed)
    if kwargs.get("indices") is not None or kwargs.get("block_indices") is not None:
        structure = with_selected_keys(module, structure, query.shape[1], kwargs)
    return structure


def _hides_nothing(structure: CallStructure) -> bool:
    """Whether every query sees every key, so that stock attention would need no mask."""
    known = structure if torch.compiler.is_compiling() else structure.settled()
    if not known.plain or known.windowed:
        return False
    return not known.causal or (known.q_len == 1 and known.offset() >= known.kv_len - 1)


def read_mask(
    module: nn.Module, q_shape: torch.Size, k_shape: torch.Size, attention_mask: Any, is_causal: bool | None
) -> tuple[CallStructure, Tensor | None]:
    """Returns the structure and the additive bias that `attention_mask` stands for.

    Raises:
        TypeError: The mask is neither a `StructuredMask` nor a tensor.
        ValueError: The mask has another shape than the scores.
    """
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
            return CallStructure(*call), None
        return recall(call) or remember(call, CallStructure(*call)), None
    if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
        if attention_mask.shape[0] not in (1, batch) or attention_mask.shape[1] < kv_len:
            raise ValueError(
                f"attention_mask: got shape {tuple(attention_mask.shape)}, expected [{batch}, {kv_len}] or more columns"
            )
        # flash-attn takes such masks, and causality beside them: there the last query stands at the last key
        causal = maskless(module, q_shape, k_shape, is_causal)[3]
        return CallStructure(
            batch,
            q_len,
            kv_len,
            causal,
            kv_len - q_len if causal else 0,
            key_padding=attention_mask.bool()[:, attention_mask.shape[1] - kv_len :].expand(batch, -1),
        ), None
    from .refusals import check_dense

    check_dense(module, attention_mask, (batch, heads, q_len, kv_len))
    mask: Tensor = attention_mask
    if mask.dtype.is_floating_point:
        return CallStructure(batch, q_len, kv_len), mask
    return CallStructure(batch, q_len, kv_len, mask=mask.bool()), None
