"""Calls that are not ordinary: masks and keywords with a meaning, listeners, autocast, traced graphs."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.utils import output_capturing

from adaattn_hf.attention.call import AttentionCall, in_one_batch, one_dtype, restored
from adaattn_hf.attention.listeners import Listener, ask, listeners, show
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.attention.tracing import holds_no_memory, transient
from adaattn_hf.backends.eager import attention_weights
from adaattn_hf.backends.select import attend
from adaattn_hf.config import EXACT, raw_settings, settings_of

from ..mask.documents import with_documents, with_dropped, with_selected_keys
from ..mask.structured_mask import StructuredMask, maskless, recall, store_structure
from ..plans.slots import LAYER, instead
from .refusals import KNOWN_KEYWORDS, MEANINGFUL_KEYWORDS, check_call, check_dense, check_paged, check_square, with_bias

if TYPE_CHECKING:
    from adaattn_hf.plans.bound_layer import BoundLayer


def attend_extended(
    module: nn.Module,
    call: AttentionCall,
    attention_mask: Any,
    is_causal: bool | None,
    backend: str | None,
    streams: Any,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Serves any call: reads the mask and the keywords, then runs attention, by a plan where the model has one.

    `call` has no structure yet; `streams` is what a cache's carriers said of heads that keep tokens of their own.
    """
    compiling, dtype = torch.compiler.is_compiling(), call.query.dtype
    _read(module, call, attention_mask, is_causal, kwargs, streams is not None)
    heard_by: tuple[Listener, ...] = () if compiling else listeners()
    raw = raw_settings(getattr(module, "config", None))
    settings = EXACT if raw is None else settings_of(raw, LAYER in module.__dict__)
    forced = settings.backend if backend is None else backend
    collected = None if compiling else output_capturing._active_collector.get()  # as in `interface`
    wants_weights = kwargs.get("output_attentions") or (collected is not None and "attentions" in collected)
    if not compiling:
        call.layer, call.backend = module.__dict__.get("layer_idx"), forced
    if streams is not None:
        return restored(streams.attend(module, call, forced, bool(wants_weights)), dtype), None
    has_layer = LAYER in module.__dict__ or (not compiling and bool(instead()))
    if has_layer and call.window is not None and isinstance(attention_mask, Tensor):
        # positions say how many tokens a cache dropped, where a dense mask does not
        call = replace(call, structure=with_dropped(call.structure, kwargs.get("position_ids")))
    out, bound_layer = ask(heard_by, module, call) if heard_by else None, None
    if out is None and settings.plan is not None and not has_layer:
        from ..plans.bound import UNBOUND, say

        say(str(settings.plan.get("weight_hash")), UNBOUND)
        module.__dict__[LAYER] = None
    if has_layer and (out is None or wants_weights):
        # imported here: models without plans need nothing of them
        from adaattn_hf.plans import execute

        bound_layer = _by_plan(module, call)
    if compiling and raw is not None and bound_layer is None and call.structure.mask is not None:
        # the padding beside the dense mask is for plans only
        call = replace(call, structure=call.structure.with_changes(key_padding=None))
    if out is None:
        if settings.monitor and bound_layer is not None and not compiling and not any(instead()):
            from ..observe.monitoring import watched

            bound_layer = watched(module, bound_layer, call.dequantised())
        out = attend(call, forced).out if bound_layer is None else execute.attend(bound_layer, call, forced).out
    weights = None
    if wants_weights:
        weights = attention_weights(call) if bound_layer is None else execute.weights(bound_layer, call)
    if heard_by:
        show(heard_by, module, call, out)
    return restored(out, dtype), weights


def _read(
    module: nn.Module, call: AttentionCall, mask: Any, is_causal: bool | None, kwargs: dict[str, Any], streams: bool
) -> None:
    # gives a call its structure, and its tensors one dtype and batch
    query, key, value, bias, scaling = call.query, call.key, call.value, call.bias, call.scaling
    # a setting of GPT-2, read from `__dict__` because a failing `Module.__getattr__` is slow
    upcasts = bool(module.__dict__.get("reorder_and_upcast_attn"))
    if call.stored is None and not streams:
        query, key, value = one_dtype(query, key, value, upcasts)
    else:
        query, _, _ = one_dtype(query, query, query, upcasts)
    if not (
        (mask is None or isinstance(mask, StructuredMask))
        and bias is None
        and (scaling is None or type(scaling) is float)
        and (call.window is None or mask is not None)
        and KNOWN_KEYWORDS.issuperset(kwargs)
    ):
        check_call(module, query, key, mask, bias, scaling, call.window, kwargs)
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        query, key, value = in_one_batch(query, key, value)
    structure, added = _read_mask(module, query.shape, key.shape, mask, is_causal)
    if not MEANINGFUL_KEYWORDS.isdisjoint(kwargs):
        structure = _with_keywords(module, structure, mask, query.shape[1], kwargs)
    plain = type(query) is type(key) is type(value) is Tensor
    if not torch.compiler.is_compiling() and (plain or not holds_no_memory(query, key, value)):
        structure = structure.simplified()
    if bias is not None:
        bias = bias[..., : structure.q_len, : structure.kv_len]
        added = bias if added is None else with_bias(added, bias, query, structure.kv_len)
    call.query, call.key, call.value, call.structure, call.bias = query, key, value, structure, added
    call.scaling, call.per_head = (query.shape[3] or 1) ** -0.5 if scaling is None else scaling, None
    call.check()


def _read_mask(
    module: nn.Module, q_shape: torch.Size, k_shape: torch.Size, attention_mask: Any, is_causal: bool | None
) -> tuple[MaskStructure, Tensor | None]:
    # the structure and additive bias that a mask of any form stands for
    batch, heads, q_len, _ = q_shape
    kv_len = k_shape[2]
    if isinstance(attention_mask, StructuredMask):
        structure = attention_mask.structure.expanded(batch)
        if structure.q_len == q_len and structure.kv_len == kv_len:
            return structure, None
        # made for the first layer of a cache whose layers hold unequal numbers of tokens: it may hide nothing
        simplified = structure if torch.compiler.is_compiling() else structure.simplified()
        if (
            simplified.q_len != q_len
            or not simplified.plain
            or simplified.windowed
            or (simplified.causal and not (q_len == 1 and simplified.offset() >= simplified.kv_len - 1))
        ):
            raise ValueError(
                f"attention_mask: made for {structure.q_len} queries and {structure.kv_len} keys, got "
                f"{q_len} queries and {kv_len} keys in {type(module).__name__}; pass the mask of this call. Layers "
                "of a cache that hold unequal numbers of tokens are read by one query at a time, without padding"
            )
        attention_mask, is_causal = None, False
    if attention_mask is None:
        made_of = maskless(module, q_shape, k_shape, is_causal)
        if transient():
            return MaskStructure(*made_of), None
        return recall(made_of) or store_structure(made_of, MaskStructure(*made_of)), None
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
    check_dense(module, attention_mask, (batch, heads, q_len, kv_len))
    mask: Tensor = attention_mask
    if mask.dtype.is_floating_point:
        return MaskStructure(batch, q_len, kv_len), mask
    return MaskStructure(batch, q_len, kv_len, mask=mask.bool()), None


def _with_keywords(
    module: nn.Module, structure: MaskStructure, mask: Any, heads: int, kwargs: dict[str, Any]
) -> MaskStructure:
    # what keywords add to a structure: packed documents and selected keys
    check_paged(module, kwargs)
    if (cu_q := kwargs.get("cu_seq_lens_q")) is not None:
        cu_k = kwargs.get("cu_seq_lens_k")
        if isinstance(mask, StructuredMask):
            if mask.fixed_chunks:
                raise ValueError(
                    "cu_seq_lens_q: got packed documents beside an attention_mask, or before Transformers 5.23, in a "
                    f"compiled graph of a model with chunked attention ({type(module).__name__}), whose chunks then "
                    "count from the row's first key and not from each document's; leave the attention_mask out and "
                    "pass position_ids, or run the model without torch.compile"
                )
            packed = mask.packed_by(cu_q, cu_k)
            if packed is None:
                packed = with_documents(structure, cu_q, cu_k, mask.cut)
                # the tensors are kept so that their identities stay theirs
                mask.packed[id(cu_q), id(cu_k)] = cu_q, cu_k, packed
            structure = packed
        else:
            if isinstance(mask, Tensor) and mask.ndim == 4:
                check_square(structure)
            structure = with_documents(structure, cu_q, cu_k)
    return with_selected_keys(module, structure, heads, kwargs)


def _by_plan(module: nn.Module, call: AttentionCall) -> "BoundLayer | None":
    # what a module's plan does about a call, None where it is exact
    if not torch.compiler.is_compiling():
        from ..plans.bound import checked_layer

        return checked_layer(module)
    # blocks of `use_plan` run outside of graphs
    bound_layer: BoundLayer | None = getattr(module, LAYER, None)
    if bound_layer is None:
        return None
    if (bound_layer := bound_layer.of_call(call.key.shape[1], call.query.shape[2])) is not None:
        chunks = getattr(getattr(module, "config", None), "attention_chunk_size", None)
        if chunks and any(choice.keys is not None for choice in bound_layer.plan.choices):
            raise ValueError(
                f"plan of layer {bound_layer.plan.layer}: counts keys from a sequence's first, which a traced graph of "
                f"{type(module).__name__} does not tell from a chunk's; run the model without torch.compile, or remove "
                "the plan with adaattn_hf.remove_plan(model)"
            )
    return bound_layer
