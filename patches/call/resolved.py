"""Ordinary calls: from what Transformers hands over straight to the kernel of their kind.

A small call spends more time in Python than in its kernel, so that nothing is looked at here but what may differ
between calls of one kind. Whatever is not ordinary (a listener, autocast, a keyword with a meaning, rows beyond the
lengths of a plan) goes the long way, by `extended`.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.utils import output_capturing

from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.listeners import listeners
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.attention.tracing import any_autocast
from adaattn_hf.backends.select import kernel_of
from adaattn_hf.config import settings_of

from ..mask.structured_mask import StructuredMask, maskless, recall
from ..plans.slots import LAYER, instead, layer_of
from .keywords import ALLOWED_KEYWORDS

if TYPE_CHECKING:
    from adaattn_hf.attention.heads import HeadRules
    from adaattn_hf.plans.bound_layer import BoundLayer

collecting: Callable[[], Any] = output_capturing._active_collector.get
"""What Transformers collects by hooks: attention weights, say, as GPT-2 does not pass `output_attentions` on."""


def attend_ordinary(
    module: nn.Module,
    call: AttentionCall,
    attention_mask: Any,
    is_causal: bool | None,
    backend: str | None,
    kwargs: dict[str, Any],
) -> Tensor | None:
    """The output `[batch, q_len, heads, head_dim_v]` of an ordinary call; None for one that goes the long way.

    `call` has no structure yet, which the mask gives, and no rules per head, which a plan does.
    """
    fields, query, key, value = module.__dict__, call.query, call.key, call.value
    q_shape, k_shape = query.shape, key.shape  # each is made anew when it is asked for
    if (
        not ALLOWED_KEYWORDS.issuperset(kwargs)
        or listeners()
        or any_autocast()
        or fields.get("reorder_and_upcast_attn")
        or ((collector := collecting()) is not None and "attentions" in collector)
        or not len(q_shape) == len(k_shape) == value.dim() == 4
        or q_shape[0] != k_shape[0]
        or not (call.stored is not None or query.dtype is key.dtype is value.dtype)
    ):
        return None
    if type(attention_mask) is StructuredMask:
        structure: MaskStructure | None = attention_mask.structure
    elif attention_mask is None:
        structure = recall(maskless(module, q_shape, k_shape, is_causal))
    else:
        structure = None
    if structure is None or structure.q_len != q_shape[2] or structure.kv_len != k_shape[2]:
        return None
    if structure.batch != q_shape[0]:
        structure = structure.expanded(q_shape[0])
    if structure.key_padding is not None or type(structure.q_offset) is not int:
        structure = structure.simplified()
    config = fields.get("config")
    raw = None if config is None else object.__getattribute__(config, "__dict__").get("adaattn")
    if raw is not None:
        asked = settings_of(raw, LAYER in fields)
        if asked.monitor or asked.shadow or (asked.plan is not None and LAYER not in fields):
            return None  # also where it is said that a plan is not bound
        backend = asked.backend if backend is None else backend
    call.structure = structure
    # as `layer_of` does, without a call where no block is open
    bound_layer: BoundLayer | None = fields.get(LAYER) if instead() is None else layer_of(module)
    if bound_layer is not None:
        rules = _rules(module, bound_layer, call)
        if rules is None:
            return None
        (call.per_head,) = rules
    if call.scaling is None:
        call.scaling = (q_shape[3] or 1) ** -0.5
    kernel = kernel_of(call, backend, compiling=False)
    # where nobody serves the rules of all heads at once, the long way asks for them apart
    return None if kernel is None else kernel(call).out


def _rules(module: nn.Module, bound_layer: BoundLayer, call: AttentionCall) -> tuple[HeadRules | None] | None:
    """The rules per head by which a module's plan is one launch, `(None,)` where it is exact; None for the long way."""
    bound = None if module.training or bound_layer.owner is None else bound_layer.owner()
    if bound is None or get_ident() not in bound.threads:
        return None
    structure, query, key, value = call.structure, call.query, call.key, call.value
    few, speaks = bound_layer.speaks_for(structure)
    if isinstance(few, Tensor) or (speaks is None and not (structure.paged and structure.window is None)):
        return None
    if speaks is False:
        return (None,)
    if (
        structure.mask is not None
        or len(bound_layer.plan.choices) != key.shape[1]
        or (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad))
    ):
        return None
    if call.stored is not None:
        bound_layer = bound_layer.for_quantised_cache
    launch = bound_layer.decode if few else bound_layer.prefill
    if not launch.whole:
        return None
    return (launch.rules if speaks else launch.ending,)  # a step over pages knows its lengths on the device alone
