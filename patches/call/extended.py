"""Calls that are not ordinary: masks and keywords with a meaning, plans beyond one launch, listeners, traced graphs."""

from __future__ import annotations

from torch import Tensor

from adaattn_hf.attention.request import AttentionRequest, check_tensors, head_dim_of, holds_no_memory, in_one_batch
from adaattn_hf.attention.tap import NOBODY, listening
from adaattn_hf.backends.eager import attention_weights
from adaattn_hf.backends.select import attend
from adaattn_hf.config import EXACT, raw_settings, settings_in

from ..mask.structured_mask import StructuredMask
from .arguments import Call, one_dtype, read_mask, restored, with_keywords
from .keywords import KNOWN, MEANT
from .resolved import collecting


def attend_extended(call: Call, compiling: bool) -> tuple[Tensor, Tensor | None]:
    """Serves any call: reads the mask and the keywords, then runs attention, by a plan where the model has one."""
    module = call.module
    request = _request_of(call, compiling)
    config = getattr(module, "config", None)
    heard = NOBODY if compiling else listening()
    adapted = raw_settings(config) is not None
    settings = settings_in(config) if adapted else EXACT
    forced = settings.backend if call.backend is None else call.backend
    collected = None if compiling else collecting()
    wanted = call.kwargs.get("output_attentions") or (collected is not None and "attentions" in collected)
    if call.streams is not None:
        return restored(call.streams.attend(module, request, forced, bool(wanted)), call.query.dtype), None
    if heard.recorder is not None:
        heard.recorder.record(module, request.checked_kind(), forced)
        if heard.recorder.dry:
            batch, heads, q_len, _ = request.query.shape
            return request.query.new_empty((batch, q_len, heads, head_dim_of(request.value))), None
    program = None
    if adapted or heard.seats is not None:
        # imported here: models without settings need nothing of plans
        from adaattn_hf.plans import execute

        from ..observe import shadow
        from .planned import program_for

        program, request = program_for(call, request, config, compiling, heard)
    if heard.tap is not None:
        request.layer = module.__dict__.get("layer_idx")
        out = heard.tap(module, request.widened())
    elif program is None:
        out = attend(request, forced).out
    else:
        out = execute.attend(program, request, forced, call.sliding_window).out
    if settings.shadow and heard.tap is None and not compiling:
        shadow.compare(module, request, forced, program, out, limit=settings.shadow, action=settings.mismatch)
    weights = None
    if wanted:
        weights = attention_weights(request) if program is None else execute.weights(program, request)
    if heard.recorder is not None:
        heard.recorder.answered(module, request, forced, out)
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
