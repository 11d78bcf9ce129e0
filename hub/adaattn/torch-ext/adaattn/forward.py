"""The attention function that Transformers calls, once per layer and forward pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .attention.call import AttentionCall, check_tensors, one_dtype, restored
from .attention.structure import MaskStructure
from .attention.tracing import transform_at_work
from .backends import select
from .bind import layer_by
from .config import settings_in
from .mask import structure_of
from .patches.call.refusals import check_call, check_dense, check_paged, check_square, check_transform, with_bias
from .patches.mask.documents import with_documents, with_dropped, with_selected_keys
from .plans import execute
from .plans.plan import PlanError


def flash_attn_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention `[batch, q_len, heads, head_dim_v]`, and None for the weights.

    Args:
        module: The attention module; its configuration may carry settings and a plan.
        query: `[batch, heads, q_len, head_dim]`.
        key, value: `[batch, num_kv_heads, kv_len, head_dim]`, values of any head size.
        attention_mask: `[batch, 1, q_len, kv_len]`, boolean (True = attend) or added to the scores; None for a call
            that `is_causal` describes.
        scaling: Factor on the scores, `head_dim ** -0.5` by default.
        dropout: Probability of dropping a weight.
        is_causal: Causality without a mask, the module's own by default.
        sliding_window: Window of the layer, which the mask holds already.
        softcap, s_aux, position_bias: Softcap, learned sinks and additive bias of the families that have them.
        kwargs: What Transformers hands to every implementation. `cu_seq_lens_q` and `cu_seq_lens_k` keep packed
            documents apart, and `indices` or `block_indices` are keys that the model has selected.

    Raises:
        ValueError: Attention weights are asked for, an argument is none that attention takes or a keyword that nobody
            knows, or a plan meets a mask whose shape cannot be told.
        BackendRefusal: The backend that the settings name cannot serve the call.
        PlanError: The plan does not belong to the module, or needs the file of its calibrated tensors.
    """
    if kwargs.get("output_attentions"):
        raise ValueError(
            "output_attentions: got True, expected False: this kernel returns no weights; load the model with "
            "attn_implementation='eager'"
        )
    check_tensors(query, key, value)
    check_call(module, query, key, attention_mask, position_bias, scaling, sliding_window, kwargs)
    check_paged(module, kwargs)
    compiling = torch.compiler.is_compiling()
    settings = settings_in(getattr(module, "config", None))
    if settings.monitor:
        raise ValueError(
            "config.adaattn['monitor']: got True, expected False: monitoring needs the package adaattn-hf; install it "
            "and load the model with attn_implementation='adaattn'"
        )
    if settings.plan is not None and settings.plan.get("tensors"):
        raise PlanError(
            "config.adaattn['plan']: it has calibrated tensors in a file beside the weights, which this kernel does "
            "not read; install adaattn-hf and load the model with attn_implementation='adaattn', or calibrate without "
            "score ranks and int8 (--families window,bf16)"
        )
    backend = settings.backend
    transform = None if compiling else transform_at_work()
    if transform is not None:
        check_transform("native" if backend == "native" else None, transform, query, key)
        backend = backend or "eager"
    out_dtype = query.dtype
    query, key, value = one_dtype(query, key, value, bool(module.__dict__.get("reorder_and_upcast_attn")))
    causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    bias = position_bias
    batch, heads, q_len, head_dim = query.shape
    kv_len = key.shape[2]
    if attention_mask is not None:
        check_dense(module, attention_mask, (batch, heads, q_len, kv_len))
    cut, positions = 0, kwargs.get("position_ids")
    if positions is not None and getattr(module, "is_kv_shared_layer", False):
        cut = positions.shape[-1] - q_len  # Gemma 4 hands over the last queries alone, and the positions of all
    if attention_mask is None:
        # without a mask stock attention aligns causality to the first key, and a single query stands at the last one
        structure = MaskStructure(batch, q_len, kv_len, causal, kv_len - 1 if cut + q_len == 1 else cut)
    elif attention_mask.dtype.is_floating_point:
        structure = MaskStructure(batch, q_len, kv_len)
        bias = attention_mask if bias is None else with_bias(attention_mask, bias, query, kv_len)
    elif compiling or transform is not None:
        structure = MaskStructure(batch, q_len, kv_len, mask=attention_mask.bool())
    else:
        structure = structure_of(attention_mask, batch, kv_len, causal, sliding_window)
    if (cu_q := kwargs.get("cu_seq_lens_q")) is not None:
        cu_k = kwargs.get("cu_seq_lens_k")
        if attention_mask is not None and (structure.mask is not None or attention_mask.is_floating_point()):
            check_square(structure)
        structure = with_documents(structure, cu_q, cu_q if cu_k is None else cu_k, cut)
    structure = with_selected_keys(module, structure, heads, kwargs)
    scaling = (head_dim or 1) ** -0.5 if scaling is None else scaling
    call = AttentionCall(
        query, key, value, structure, scaling, dropout=dropout, softcap=softcap, sink_logits=s_aux, bias=bias
    )
    call.check()
    bound_layer = None if settings.plan is None else layer_by(module, settings.plan)
    if bound_layer is None:
        out = select.attend(call, backend).out
    else:
        if structure.mask is not None or (attention_mask is not None and attention_mask.dtype.is_floating_point):
            raise ValueError(
                "attention_mask: got a mask that is not made of padding, causality and the layer's window, beside a "
                "plan in config.adaattn, which needs to know where sequences start; install adaattn-hf and load the "
                "model with attn_implementation='adaattn', or remove the plan"
            )
        if sliding_window is not None:
            call = replace(call, structure=with_dropped(structure, positions))
        out = execute.attend(bound_layer, call, backend).out
    # AFMoE takes a view of it
    return restored(out, out_dtype), None
