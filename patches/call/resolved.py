"""Ordinary calls: from what Transformers hands over straight to the kernel of their kind.

A small call spends more time in Python than in its kernel, so that nothing is looked at here but what may differ
between calls of one kind. Whatever is not ordinary (a listener, autocast, a keyword with a meaning, rows beyond the
lengths of a plan) goes the long way, by `extended` and a request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers.utils import output_capturing

from adaattn_hf import config as settings
from adaattn_hf.attention.listeners import listeners
from adaattn_hf.attention.request import AttentionRequest
from adaattn_hf.attention.structure import CallStructure
from adaattn_hf.attention.tracing import any_autocast
from adaattn_hf.backends.select import kernel_of

from ..mask.structured_mask import StructuredMask, maskless, recall
from ..plans.slots import LAYER, layer_of
from .keywords import IDLE

if TYPE_CHECKING:
    from adaattn_hf.attention.heads import HeadRules
    from adaattn_hf.attention.stored import StoredKV

collecting: Callable[[], Any] = output_capturing._active_collector.get
"""What Transformers collects by hooks: attention weights, say, as GPT-2 does not pass `output_attentions` on."""


def attend_ordinary(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    is_causal: bool | None,
    scaling: float | None,
    backend: str | None,
    stored: StoredKV | None,
    kwargs: dict[str, Any],
) -> Tensor | None:
    """The output `[batch, q_len, heads, head_dim_v]` of an ordinary call; None for one that goes the long way."""
    fields = module.__dict__
    if (
        not IDLE.issuperset(kwargs)
        or listeners()
        or any_autocast()
        or fields.get("reorder_and_upcast_attn")
        or ((collector := collecting()) is not None and "attentions" in collector)
        or not query.dim() == key.dim() == value.dim() == 4
        or not query.shape[0] == key.shape[0] == value.shape[0]
        or not (stored is not None or query.dtype is key.dtype is value.dtype)
    ):
        return None
    if type(attention_mask) is StructuredMask:
        structure: CallStructure | None = attention_mask.structure
        if attention_mask.by_positions and "position_ids" in kwargs:
            return None
    elif attention_mask is None:
        structure = recall(maskless(module, query.shape, key.shape, is_causal))
    else:
        structure = None
    if structure is None or structure.q_len != query.shape[2] or structure.kv_len != key.shape[2]:
        return None
    if structure.batch != query.shape[0]:
        structure = structure.expanded(query.shape[0])
    if structure.key_padding is not None or type(structure.q_offset) is not int:
        structure = structure.settled()
    config = fields.get("config")
    raw = None if config is None else object.__getattribute__(config, "__dict__").get("adaattn")
    rules: HeadRules | None = None
    if raw is not None:
        asked = settings.settings_of(raw)
        if asked.monitor or asked.shadow:
            return None
        backend = asked.backend if backend is None else backend
        if asked.plan is not None and LAYER not in fields:
            return None  # where it is said that the plan is not bound
    if (layer := layer_of(module)) is not None:
        from .planned import rules_of  # models without plans need nothing of them

        planned = rules_of(module, layer, structure, query, key, value, stored)
        if planned is None:
            return None
        (rules,) = planned
    factor = (query.shape[3] or 1) ** -0.5 if scaling is None else scaling
    request = AttentionRequest(query, key, value, structure, factor, per_head=rules, stored=stored)
    kernel = kernel_of(request, backend)
    # where nobody serves the rules of all heads at once, the long way asks for them apart
    return None if kernel is None else kernel(request).out
