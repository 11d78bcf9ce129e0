"""The attention function that Transformers calls once per layer and forward pass, and the fast path of ordinary calls.

A small call spends more time in Python than in its kernel, so that the fast path looks at nothing but what may differ
between calls of one kind. Where a plan asks for several launches, it is cut by `execute`. Whatever is not ordinary (a
listener, autocast, a keyword with a meaning) goes the long way, by `extended`.
"""

from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from transformers.utils import output_capturing

from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.listeners import listeners
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.attention.tracing import any_autocast, dispatch_modes, func_transform, jit_trace, transform_at_work
from adaattn_hf.backends.select import kernel_of
from adaattn_hf.config import settings_of

from ..mask.structured_mask import StructuredMask, maskless, recall
from ..plans.slots import BLOCKS, LAYER, instead, layer_of
from .refusals import ALLOWED_KEYWORDS, DOCUMENTS, check_transform

if TYPE_CHECKING:
    from adaattn_hf.plans.bound_layer import BoundLayer

UNREAD: Any = None
"""In place of the structure and the scaling of a call that nobody has read yet."""

collecting: Callable[[], Any] = output_capturing._active_collector.get
"""What Transformers collects by hooks: attention weights, say, as GPT-2 does not pass `output_attentions` on."""

AttentionFunction = Callable[..., tuple[Tensor, "Tensor | None"]]


def attention_function(backend: str | None = None) -> AttentionFunction:
    """The function to register under a name: a backend serves every call, None chooses one per kind of call."""

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
        watched = not compiling and (
            jit_trace() is not None or forward_ad._current_level >= 0 or func_transform() or dispatch_modes()
        )
        if compiling:
            outside: AttentionFunction | None = None
            of_heads = getattr(key, "streams", None)
            if getattr(module, BLOCKS, False):
                outside = use_plan_runs_outside_graphs
            elif of_heads is not None and not (query.shape[2] == 1 and of_heads.steps_in_graphs):
                outside = streaming_heads_run_outside_graphs
            if outside is not None:
                return outside(
                    adaattn, module, query, key, value, attention_mask, dropout, scaling, is_causal,
                    sliding_window=sliding_window, softcap=softcap, s_aux=s_aux, sinks=sinks,
                    position_bias=position_bias, **kwargs,
                )  # fmt: skip
        forced = backend
        if watched and backend in (None, "native") and (transform := transform_at_work()) is not None:
            check_transform(backend, transform, query, key)
            forced = "eager"  # a transform sees torch's operations, and nothing of our kernels
        stored = streams = None
        if not isinstance(key, Tensor):  # a `StoredTensor`, which quantised and streaming caches return
            carriers: tuple[Any, Any] = key, value
            stored, streams, prompt = carriers[0].record, carriers[0].streams, carriers[0].prompt
            key, value = carriers[0].codes, carriers[1].codes
            if prompt is not None and not compiling:
                prompt.reread(query, key)  # its cache rounds the keys again, for these queries
        call = AttentionCall(
            query, key, value, UNREAD,
            scaling,  # type: ignore[arg-type]  # None where it is left to whoever reads the call
            dropout, softcap, sinks if s_aux is None else s_aux, position_bias, stored=stored,
        )  # fmt: skip
        if (
            not (compiling or watched or dropout)
            and softcap is None
            and s_aux is None
            and sinks is None
            and position_bias is None
            and streams is None
            and (sliding_window is None or attention_mask is not None)
            and (scaling is None or (type(scaling) is float and scaling > 0.0))
        ):
            out = attend_ordinary(module, call, attention_mask, is_causal, backend, kwargs)
            if out is not None:
                return out.contiguous(), None
        from .extended import attend_extended  # a process whose calls are ordinary needs nothing of it

        call.window = sliding_window
        return attend_extended(module, call, attention_mask, is_causal, forced, streams, kwargs)

    return adaattn


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
    packed = not ALLOWED_KEYWORDS.issuperset(kwargs)
    if (
        (packed and not kwargs.keys() - ALLOWED_KEYWORDS <= DOCUMENTS)
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
        if packed:  # with borders that an earlier layer of the pass has read, by the long way
            structure = attention_mask.packed_by(kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k"))
    elif attention_mask is None and not packed:
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
        settings = settings_of(raw, LAYER in fields)
        if settings.monitor or (settings.plan is not None and LAYER not in fields):
            return None  # also where it is said that a plan is not bound
        backend = settings.backend if backend is None else backend
    call.structure = structure
    if call.scaling is None:
        call.scaling = (q_shape[3] or 1) ** -0.5
    # as `layer_of` does, without a call where no block is open
    bound_layer: BoundLayer | None = layer_of(module) if instead() else fields.get(LAYER)
    if bound_layer is not None:
        bound = None if module.training or bound_layer.owner is None else bound_layer.owner()
        if bound is None or get_ident() not in bound.threads:
            return None
        decode, speaks = bound_layer.speaks_for(structure)
        if speaks is not False:
            if (
                isinstance(decode, Tensor)
                # a step over pages knows its lengths on the device alone
                or (speaks is None and not (structure.paged and structure.window is None))
                or structure.mask is not None
                or len(bound_layer.plan.choices) != k_shape[1]
                or (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad))
            ):
                return attend_in_parts(bound_layer, call, backend)
            served = bound_layer if call.stored is None else bound_layer.for_quantised_cache
            launch = served.decode if decode else served.prefill
            if launch.separate:
                return attend_in_parts(bound_layer, call, backend)
            call.per_head = launch.rules if speaks else launch.ending
    kernel = kernel_of(call, backend, compiling=False)
    if kernel is not None:
        return kernel(call).out
    # where nobody serves the rules of all heads at once, they are asked for apart
    return None if bound_layer is None else attend_in_parts(bound_layer, call, backend)


def attend_in_parts(bound_layer: "BoundLayer", call: AttentionCall, backend: str | None) -> Tensor | None:
    """The same where a plan needs several launches; None over pages, and beside a mask that only the long way reads."""
    if call.structure.paged or call.structure.mask is not None:
        return None
    # imported here: models without plans need nothing of them
    from adaattn_hf.plans import execute

    call.per_head = None
    call.check()  # as a whole, before it is cut
    return execute.attend(bound_layer, call, backend).out


@torch.compiler.disable  # type: ignore[untyped-decorator]
def use_plan_runs_outside_graphs(attention: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Calls an attention function outside the graph; with `fullgraph=True` torch's error shows this function's name."""
    return attention(*args, **kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def streaming_heads_run_outside_graphs(attention: Any, /, *args: Any, **kwargs: Any) -> Any:
    """The same for a cache whose heads keep tokens of their own: what is written and read is counted on the host."""
    return attention(*args, **kwargs)
