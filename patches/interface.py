"""The attention function that Transformers calls once per layer and forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from adaattn_hf.attention.request import (
    AttentionRequest,
    check_dimensions,
    head_dim_of,
    holds_no_memory,
    in_one_batch,
)
from adaattn_hf.attention.structure import CallStructure
from adaattn_hf.attention.tap import (
    SEATED,
    listening,
    transform_at_work,
    transient,
)
from adaattn_hf.backends.base import facts_of, spec_of
from adaattn_hf.backends.eager import attention_weights
from adaattn_hf.backends.select import attend
from adaattn_hf.config import raw_settings, settings_in

from . import fast_path
from .dtypes import one_dtype, restored
from .families import KNOWN, MEANT
from .fast_path import undisturbed
from .structured_mask import StructuredMask

AttentionFunction = Callable[..., tuple[Tensor, "Tensor | None"]]


def attention_function(backend: str | None = None) -> AttentionFunction:
    """The function to register under a name.

    Args:
        backend: Name of the backend to use for every call, or None to choose one per kind of call.
    """
    maybe_native = backend is None or backend == "native"

    def adaattn(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        *,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        sinks: Tensor | None = None,
        position_bias: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the output `[batch, q_len, heads, head_dim_v]`, and weights `[batch, heads, q_len, kv_len]` or None.

        The output is contiguous: some models (AFMoE) take a view of it, and stock attention's is.
        The arguments are those of Transformers' own `sdpa`, in its order. `sliding_window` is only checked: the
        window itself comes with the mask.

        Raises:
            ValueError: A keyword may change what is computed and is not supported (named in the message), or a
                window was passed without a mask, which some stock implementations apply and others ignore.
        """
        compiling = torch.compiler.is_compiling()
        if compiling and (
            (seated := getattr(module, SEATED, False)) or getattr(key, "streams", None) is not None
        ):
            from . import uncompiled

            outside = (
                uncompiled.use_plan_runs_outside_graphs
                if seated
                else uncompiled.streaming_heads_run_outside_graphs
            )
            return outside(  # type: ignore[no-any-return]
                adaattn, module, query, key, value, attention_mask, scaling=scaling, dropout=dropout,
                is_causal=is_causal, sliding_window=sliding_window, softcap=softcap, s_aux=s_aux, sinks=sinks,
                position_bias=position_bias, **kwargs,
            )  # fmt: skip
        if maybe_native and not compiling and (transform := transform_at_work()):
            from .refusals import check_transform

            check_transform(backend, transform, query, key)
            return attention_function("eager")(
                module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, is_causal=is_causal,
                sliding_window=sliding_window, softcap=softcap, s_aux=s_aux, sinks=sinks, position_bias=position_bias,
                **kwargs,
            )  # fmt: skip
        stored = streams = None
        if not isinstance(key, Tensor):  # a `StoredTensor`, which quantised and streaming caches return
            carriers: tuple[Any, Any] = key, value
            stored, streams = carriers[0].record, carriers[0].streams
            key, value = carriers[0].codes, carriers[1].codes
        elif not compiling and (prompt := getattr(key, "_adaattn_prompt", None)) is not None:
            prompt.reread(query, key)  # its cache rounds the keys again; see `cache.tokens.PROMPT`
        if (
            not (compiling or dropout)
            and softcap is None
            and s_aux is None
            and sinks is None
            and position_bias is None
            and streams is None
            and (scaling is None or (type(scaling) is float and scaling > 0.0))
        ):
            if type(attention_mask) is StructuredMask:
                structure: CallStructure | None = attention_mask.structure  # shapes are compared below
            else:
                structure = fast_path.structure_at_hand(
                    module, query, key, attention_mask, is_causal, sliding_window
                )
            if (
                structure is not None
                and (ready := structure.ready) is not None
                and module.__dict__.get("config") is ready.config
                and ready.fields.get("adaattn") is ready.settings
                and facts_of(backend, query, key, value, stored is not None) == ready.facts
                and undisturbed(module, kwargs)
            ):
                factor = query.shape[3] ** -0.5 if scaling is None else scaling
                if ready.bare:
                    if stored is None:
                        return ready.attend(query, key, value, factor).contiguous(), None
                    return ready.attend(query, key, value, factor, stored).contiguous(), None
                beside = () if stored is None else (stored,)
                out = ready.attend(module, structure, query, key, value, factor, *beside)
                if out is not None:
                    return out.contiguous(), None
        return _attend_anew(
            backend, module, query, key, value, attention_mask, is_causal, sliding_window, scaling, dropout, softcap,
            sinks if s_aux is None else s_aux, position_bias, kwargs, compiling, stored, streams,
        )  # fmt: skip

    return adaattn


def _attend_anew(
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
    """Serves a call that the fast path does not know: reads the mask and keywords, then runs attention."""
    check_dimensions(query, key, value)
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
            fast_path.IDLE.update(name for name in kwargs.keys() - KNOWN if kwargs[name] is not None)
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
    structure, bias = _read_mask(module, query.shape, key.shape, attention_mask, is_causal)
    kept_in = structure
    meant = not MEANT.isdisjoint(kwargs)
    if meant:
        structure = _with_keywords(module, structure, attention_mask, query, kwargs)
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
    wanted = (meant and bool(kwargs.get("output_attentions"))) or (
        not compiling and fast_path.collects_weights()
    )
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
        from .cache.streams import attend_streams  # imported here: few models have a streaming cache

        out = attend_streams(module, request, streams, forced, wanted)
        return (out if out.dtype is out_dtype else restored(out, out_dtype)).contiguous(), None
    recorder = None if compiling else listening().recorder
    if recorder is not None:
        recorder.record(module, spec_of(request), forced)
        if recorder.dry:
            shape = (query.shape[0], query.shape[2], query.shape[1], head_dim_of(value))
            return query.new_empty(shape), None
    tap = None if compiling else listening().tap
    weights = None
    if adapted:
        # imported here: models without settings need nothing of plans
        from .planned import by_plan
        from .planned_call import keep

        out, weights = by_plan(module, request, forced, config, tap, wanted, sliding_window)
        if not (compiling or opaque or wanted or config is None or _extended(request)):
            keep(request, forced, backend, module, config, kwargs, kept_in)
    elif tap is not None:
        out = tap(module, request.widened())
    elif compiling or opaque or wanted or recorder is not None or _extended(request):
        out = attend(request, forced).out
    else:
        out = fast_path.attend_and_keep(request, forced, backend, module, config, kwargs, kept_in)
    if wanted and not adapted:
        weights = attention_weights(request)
    if recorder is not None:
        recorder.answered(module, request, forced, out)
    return (out if out.dtype is out_dtype else restored(out, out_dtype)).contiguous(), weights


def _extended(request: AttentionRequest) -> bool:
    """Whether a call has what no fast call serves: dropout, softcap, sinks, a bias or a factor of zero or less."""
    scaling = request.scaling
    return bool(
        request.dropout
        or (isinstance(scaling, (int, float)) and scaling <= 0)
        or request.softcap is not None
        or request.sink_logits is not None
        or request.bias is not None
    )


def _with_keywords(
    module: nn.Module, structure: CallStructure, attention_mask: Any, query: Tensor, kwargs: dict[str, Any]
) -> CallStructure:
    """Returns the structure with what keywords add to it: packed documents and selected keys.

    Raises:
        ValueError: The keys lie in a paged cache.
    """
    from .documents import with_documents
    from .packing import with_restarts
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


def _read_mask(
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
        call = fast_path.maskless(module, q_shape, k_shape, is_causal)
        if transient():
            return CallStructure(*call), None
        shared = fast_path.recall(call)
        if shared is None:
            shared = CallStructure(*call)
            fast_path.remember(call, shared)
        return shared, None
    if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
        if attention_mask.shape[0] not in (1, batch) or attention_mask.shape[1] < kv_len:
            raise ValueError(
                f"attention_mask: got shape {tuple(attention_mask.shape)}, expected [{batch}, {kv_len}] or more columns"
            )
        # flash-attn takes such masks, and causality beside them: there the last query stands at the last key
        causal = fast_path.maskless(module, q_shape, k_shape, is_causal)[3]
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
