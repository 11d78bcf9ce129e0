"""Calls that are not ordinary: masks and keywords with a meaning, plans beyond one launch, listeners, traced graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from adaattn_hf.attention.request import (
    AttentionRequest,
    check_tensors,
    head_dim_of,
    holds_no_memory,
    in_one_batch,
)
from adaattn_hf.attention.structure import CallStructure
from adaattn_hf.attention.tap import listening, transient
from adaattn_hf.backends.base import spec_of
from adaattn_hf.backends.eager import attention_weights
from adaattn_hf.backends.select import attend
from adaattn_hf.config import raw_settings, settings_in

from ..mask.structured_mask import StructuredMask, maskless, recall, remember
from .dtypes import one_dtype, restored
from .keywords import KNOWN, MEANT
from .resolved import IDLE, collects_weights


def with_keywords(
    module: nn.Module, structure: CallStructure, attention_mask: Any, query: Tensor, kwargs: dict[str, Any]
) -> CallStructure:
    """Returns the structure with what keywords add to it: packed documents and selected keys.

    Raises:
        ValueError: The keys lie in a paged cache, or documents come too late to move the chunks of a compiled graph.
    """
    from ..mask.documents import with_documents
    from ..mask.packing import with_restarts
    from .refusals import check_paged
    from .selected import with_selected_keys

    check_paged(module, kwargs)
    packed = attention_mask.packed if isinstance(attention_mask, StructuredMask) else None
    if kwargs.get("cu_seq_lens_q") is not None:
        if isinstance(attention_mask, StructuredMask) and attention_mask.fixed_chunks:
            raise ValueError(
                "cu_seq_lens_q: got packed documents beside an attention_mask in a compiled graph of a model with "
                f"chunked attention ({type(module).__name__}), whose chunks then count from the row's first key and "
                "not from each document's; leave the attention_mask out and pass position_ids, or run the model "
                "without torch.compile"
            )
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


def attend_extended(
    backend: str | None,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    is_causal: bool | None,
    sliding_window: int | None,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    sink_logits: Tensor | None,
    position_bias: Tensor | None,
    kwargs: dict[str, Any],
    compiling: bool,
    stored: Any,
    streams: Any,
) -> tuple[Tensor, Tensor | None]:
    """Serves any call: reads the mask and the keywords, then runs attention, by a plan where the model has one."""
    check_tensors(query, key, value)
    if not (
        (attention_mask is None or isinstance(attention_mask, StructuredMask))
        and position_bias is None
        and (scaling is None or type(scaling) is float)
        and (sliding_window is None or attention_mask is not None)
        and KNOWN.issuperset(kwargs)
    ):
        from .refusals import check_call

        check_call(module, query, key, attention_mask, position_bias, scaling, sliding_window, kwargs)
        if not compiling:
            IDLE.update(name for name in kwargs.keys() - KNOWN if kwargs[name] is not None)
    out_dtype = query.dtype
    if stored is None and streams is None:
        query, key, value = one_dtype(module, query, key, value)
    else:
        query, _, _ = one_dtype(module, query, query, query)
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        query, key, value = in_one_batch(query, key, value)
    opaque = not (compiling or type(query) is type(key) is type(value) is Tensor) and holds_no_memory(
        query, key, value
    )
    structure, bias = read_mask(module, query.shape, key.shape, attention_mask, is_causal)
    meant = not MEANT.isdisjoint(kwargs)
    if meant:
        structure = with_keywords(module, structure, attention_mask, query, kwargs)
    if not (compiling or opaque):
        structure = structure.settled()
    if position_bias is not None:
        position_bias = position_bias[..., : structure.q_len, : structure.kv_len]
        if bias is not None:
            from .refusals import with_bias

            position_bias = with_bias(bias, position_bias, query, structure.kv_len)
        bias = position_bias
    config = getattr(module, "config", None)
    adapted = raw_settings(config) is not None
    forced = settings_in(config).backend if adapted and backend is None else backend
    adapted = adapted or (not compiling and listening().seats is not None)
    wanted = (meant and bool(kwargs.get("output_attentions"))) or (not compiling and collects_weights())
    request = AttentionRequest(
        query,
        key,
        value,
        structure,
        query.shape[3] ** -0.5 if scaling is None else scaling,
        dropout,
        softcap,
        sink_logits,
        bias,
        stored=stored,
    )
    if streams is not None:
        out = streams.attend(module, request, forced, wanted)
        return (out if out.dtype is out_dtype else restored(out, out_dtype)).contiguous(), None
    recorder = None if compiling else listening().recorder
    if recorder is not None:
        recorder.record(module, spec_of(request), forced)
        if recorder.dry:
            shape = (query.shape[0], query.shape[2], query.shape[1], head_dim_of(value))
            return query.new_empty(shape), None
    tap = None if compiling else listening().tap
    if tap is not None:
        request.layer = module.__dict__.get("layer_idx")
    weights = None
    if adapted:
        # imported here: models without settings need nothing of plans
        from .planned import by_plan

        out, weights = by_plan(module, request, forced, config, tap, wanted, sliding_window)
    elif tap is not None:
        out = tap(module, request.widened())
    else:
        out = attend(request, forced).out
    if wanted and not adapted:
        weights = attention_weights(request)
    if recorder is not None:
        recorder.answered(module, request, forced, out)
    return (out if out.dtype is out_dtype else restored(out, out_dtype)).contiguous(), weights
