"""Calls that are not ordinary: masks and keywords with a meaning, plans beyond one launch, listeners, traced graphs."""

from __future__ import annotations

from torch import Tensor

from adaattn_hf.attention.listeners import Listener, ask, listeners, show
from adaattn_hf.attention.request import AttentionRequest, check_tensors, in_one_batch
from adaattn_hf.attention.tracing import holds_no_memory
from adaattn_hf.backends.eager import attention_weights
from adaattn_hf.backends.select import attend
from adaattn_hf.config import EXACT, raw_settings, settings_in

from ..mask.structured_mask import StructuredMask
from ..plans.slots import LAYER, instead
from .arguments import Call, one_dtype, read_mask, restored, with_keywords
from .keywords import KNOWN, MEANT
from .resolved import collecting


def attend_extended(call: Call, compiling: bool) -> tuple[Tensor, Tensor | None]:
    """Serves any call: reads the mask and the keywords, then runs attention, by a plan where the model has one."""
    module = call.module
    request = _request_of(call, compiling)
    config = getattr(module, "config", None)
    heard_by: tuple[Listener, ...] = () if compiling else listeners()
    adapted = raw_settings(config) is not None
    settings = settings_in(config) if adapted else EXACT
    forced = settings.backend if call.backend is None else call.backend
    collected = None if compiling else collecting()
    wanted = call.kwargs.get("output_attentions") or (collected is not None and "attentions" in collected)
    if not compiling:
        request.layer, request.backend = module.__dict__.get("layer_idx"), forced
    if call.streams is not None:
        return restored(call.streams.attend(module, request, forced, bool(wanted)), call.query.dtype), None
    out, program = ask(heard_by, module, request) if heard_by else None, None
    bound = LAYER in module.__dict__ or (not compiling and instead() is not None)
    if settings.plan is not None and not bound:
        from ..plans.bound import UNBOUND, say

        say(str(settings.plan.get("weight_hash")), UNBOUND)
        module.__dict__[LAYER] = None
    if bound and (out is None or wanted):
        # imported here: models without settings need nothing of plans
        from adaattn_hf.plans import execute

        from .planned import program_for

        program, request = program_for(call, request, config, compiling)
    if out is None:
        if settings.monitor and program is not None and not compiling and instead() is None:
            from ..observe.monitoring import watched

            program = watched(module, program, request.widened())
        if settings.shadow and not compiling:
            from ..observe.shadow import Shadow

            heard_by = (Shadow(program, settings), *heard_by)
        if program is None:
            out = attend(request, forced).out
        else:
            out = execute.attend(program, request, forced, call.sliding_window).out
    weights = None
    if wanted:
        weights = attention_weights(request) if program is None else execute.weights(program, request)
    if heard_by:
        show(heard_by, module, request, out)
    return restored(out, call.query.dtype), weights


def _request_of(call: Call, compiling: bool) -> AttentionRequest:
    module, query, key, value = call.module, call.query, call.key, call.value
    mask, kwargs, scaling = call.attention_mask, call.kwargs, call.scaling
    check_tensors(query, key, value)
    if not (
        (mask is None or isinstance(mask, StructuredMask))
        and call.position_bias is None
        and (scaling is None or type(scaling) is float)
        and (call.sliding_window is None or mask is not None)
        and KNOWN.issuperset(kwargs)
    ):
        from .refusals import check_call

        check_call(module, query, key, mask, call.position_bias, scaling, call.sliding_window, kwargs)
    if call.stored is None and call.streams is None:
        query, key, value = one_dtype(module, query, key, value)
    else:
        query, _, _ = one_dtype(module, query, query, query)
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        query, key, value = in_one_batch(query, key, value)
    structure, bias = read_mask(module, query.shape, key.shape, mask, call.is_causal)
    if not MEANT.isdisjoint(kwargs):
        structure = with_keywords(module, structure, mask, query.shape[1], kwargs)
    plain = type(query) is type(key) is type(value) is Tensor
    if not compiling and (plain or not holds_no_memory(query, key, value)):
        structure = structure.settled()
    if call.position_bias is not None:
        added = call.position_bias[..., : structure.q_len, : structure.kv_len]
        if bias is not None:
            from .refusals import with_bias

            added = with_bias(bias, added, query, structure.kv_len)
        bias = added
    if scaling is None:
        scaling = (query.shape[3] or 1) ** -0.5
    request = AttentionRequest(
        query, key, value, structure, scaling, call.dropout, call.softcap, call.sink_logits, bias, stored=call.stored
    )
    request.check()
    return request
