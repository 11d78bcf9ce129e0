"""Calls that are not ordinary: masks and keywords with a meaning, plans beyond one launch, listeners, traced graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from adaattn_hf.attention.call import AttentionCall, check_tensors, in_one_batch
from adaattn_hf.attention.listeners import Listener, ask, listeners, show
from adaattn_hf.attention.tracing import holds_no_memory
from adaattn_hf.backends.eager import attention_weights
from adaattn_hf.backends.select import attend
from adaattn_hf.config import EXACT, raw_settings, settings_of

from ..mask.structured_mask import StructuredMask
from ..plans.slots import LAYER, instead
from .arguments import one_dtype, read_mask, restored, with_keywords
from .keywords import KNOWN_KEYWORDS, MEANINGFUL_KEYWORDS
from .resolved import collecting

if TYPE_CHECKING:
    from adaattn_hf.plans.bound_layer import BoundLayer


def attend_extended(
    module: nn.Module,
    call: AttentionCall,
    attention_mask: Any,
    is_causal: bool | None,
    sliding_window: int | None,
    backend: str | None,
    streams: Any,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Serves any call: reads the mask and the keywords, then runs attention, by a plan where the model has one.

    `call` has no structure yet; `streams` is what a cache's carriers said of heads that keep tokens of their own.
    """
    compiling, dtype = torch.compiler.is_compiling(), call.query.dtype
    _read(module, call, attention_mask, is_causal, sliding_window, kwargs, streams is not None)
    config = getattr(module, "config", None)
    heard_by: tuple[Listener, ...] = () if compiling else listeners()
    raw = raw_settings(config)
    settings = EXACT if raw is None else settings_of(raw, LAYER in module.__dict__)
    forced = settings.backend if backend is None else backend
    collected = None if compiling else collecting()
    wanted = kwargs.get("output_attentions") or (collected is not None and "attentions" in collected)
    if not compiling:
        call.layer, call.backend = module.__dict__.get("layer_idx"), forced
    if streams is not None:
        return restored(streams.attend(module, call, forced, bool(wanted)), dtype), None
    out, bound_layer = ask(heard_by, module, call) if heard_by else None, None
    bound = LAYER in module.__dict__ or (not compiling and instead() is not None)
    if out is None and settings.plan is not None and not bound:
        from ..plans.bound import UNBOUND, say

        say(str(settings.plan.get("weight_hash")), UNBOUND)
        module.__dict__[LAYER] = None
    if bound and (out is None or wanted):
        # imported here: models without plans need nothing of them
        from adaattn_hf.plans import execute

        dense = isinstance(attention_mask, Tensor) and sliding_window is not None
        bound_layer, call = _by_plan(module, call, kwargs.get("position_ids") if dense else None)
    if compiling and raw is not None and bound_layer is None and call.structure.mask is not None:
        # the padding beside the dense mask is for plans only
        call = replace(call, structure=call.structure.with_changes(key_padding=None))
    if out is None:
        if settings.monitor and bound_layer is not None and not compiling and instead() is None:
            from ..observe.monitoring import watched

            bound_layer = watched(module, bound_layer, call.dequantised())
        if settings.shadow and not compiling:
            from ..observe.shadow import Shadow

            heard_by = (Shadow(bound_layer, settings), *heard_by)
        out = (
            attend(call, forced).out
            if bound_layer is None
            else execute.attend(bound_layer, call, forced, sliding_window).out
        )
    weights = None
    if wanted:
        weights = attention_weights(call) if bound_layer is None else execute.weights(bound_layer, call)
    if heard_by:
        show(heard_by, module, call, out)
    return restored(out, dtype), weights


def _read(
    module: nn.Module,
    call: AttentionCall,
    mask: Any,
    is_causal: bool | None,
    sliding_window: int | None,
    kwargs: dict[str, Any],
    streams: bool,
) -> None:
    """Gives a call its structure, and its tensors one dtype and batch; refuses what is not served (ValueError)."""
    query, key, value, bias, scaling = call.query, call.key, call.value, call.bias, call.scaling
    check_tensors(query, key, value)
    if not (
        (mask is None or isinstance(mask, StructuredMask))
        and bias is None
        and (scaling is None or type(scaling) is float)
        and (sliding_window is None or mask is not None)
        and KNOWN_KEYWORDS.issuperset(kwargs)
    ):
        from .refusals import check_call

        check_call(module, query, key, mask, bias, scaling, sliding_window, kwargs)
    if call.stored is None and not streams:
        query, key, value = one_dtype(module, query, key, value)
    else:
        query, _, _ = one_dtype(module, query, query, query)
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        query, key, value = in_one_batch(query, key, value)
    structure, added = read_mask(module, query.shape, key.shape, mask, is_causal)
    if not MEANINGFUL_KEYWORDS.isdisjoint(kwargs):
        structure = with_keywords(module, structure, mask, query.shape[1], kwargs)
    plain = type(query) is type(key) is type(value) is Tensor
    if not torch.compiler.is_compiling() and (plain or not holds_no_memory(query, key, value)):
        structure = structure.simplified()
    if bias is not None:
        bias = bias[..., : structure.q_len, : structure.kv_len]
        if added is not None:
            from .refusals import with_bias

            bias = with_bias(added, bias, query, structure.kv_len)
        added = bias
    call.query, call.key, call.value, call.structure, call.bias = query, key, value, structure, added
    call.scaling, call.per_head = (query.shape[3] or 1) ** -0.5 if scaling is None else scaling, None
    call.check()


def _by_plan(module: nn.Module, call: AttentionCall, positions: Any) -> tuple[BoundLayer | None, AttentionCall]:
    """Returns what a module's plan does about a call, None where it is exact, and the call as that needs it.

    `positions` say how many tokens a cache dropped, where a dense mask does not.
    """
    compiling = torch.compiler.is_compiling()
    bound_layer: BoundLayer | None = None
    if compiling:  # blocks of `use_plan` run outside of graphs
        bound_layer = getattr(module, LAYER, None)
    else:
        from ..plans.bound import checked_layer

        bound_layer = checked_layer(module)
    if bound_layer is not None and isinstance(positions, Tensor) and positions.dim() == 2:
        dropped = (positions[:, -1] - call.structure.kv_len + 1).clamp_min(0)
        call = replace(call, structure=call.structure.with_changes(dropped=dropped))
    if compiling:
        if bound_layer is not None and bound_layer.is_exact_for(call.query.shape[2]):
            bound_layer = None
        chunks = bound_layer is not None and getattr(getattr(module, "config", None), "attention_chunk_size", None)
        if bound_layer is not None and chunks and any(choice.keys is not None for choice in bound_layer.plan.choices):
            raise ValueError(
                f"plan of layer {bound_layer.plan.layer}: counts keys from a sequence's first, which a traced graph of "
                f"{type(module).__name__} does not tell from a chunk's; run the model without torch.compile, or remove "
                "the plan with adaattn_hf.remove_plan(model)"
            )
    return bound_layer, call
