"""The attention function that Transformers calls once per layer and forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.tracing import dispatch_modes, func_transform, jit_trace, transform_at_work

from ..plans.slots import BLOCKS
from .extended import attend_extended as attend_extended
from .resolved import attend_ordinary

UNREAD: Any = None
"""In place of the structure and the scaling of a call that nobody has read yet."""

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
        if compiling and (outside := _outside_graphs(module, query, key)) is not None:
            return outside(
                adaattn, module, query, key, value, attention_mask, dropout, scaling, is_causal,
                sliding_window=sliding_window, softcap=softcap, s_aux=s_aux, sinks=sinks,
                position_bias=position_bias, **kwargs,
            )  # fmt: skip
        forced = _beneath_transforms(backend, query, key) if watched else backend
        stored = streams = None
        if not isinstance(key, Tensor):  # a `StoredTensor`, which quantised and streaming caches return
            carriers: tuple[Any, Any] = key, value
            stored, streams, prompt = carriers[0].record, carriers[0].streams, carriers[0].prompt
            key, value = carriers[0].codes, carriers[1].codes
            if prompt is not None and not compiling:
                prompt.reread(query, key)  # its cache rounds the keys again, for these queries
        said_scaling: Any = scaling  # None where it is left to whoever reads the call
        call = AttentionCall(
            query, key, value, UNREAD, said_scaling, dropout, softcap, sinks if s_aux is None else s_aux, position_bias,
            stored=stored,
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
            call.scaling = said_scaling
        return attend_extended(module, call, attention_mask, is_causal, sliding_window, forced, streams, kwargs)

    return adaattn


def _beneath_transforms(backend: str | None, query: Tensor, key: Tensor) -> str | None:
    """The backend of a call that others may follow: a transform sees torch's operations, and nothing of our kernels."""
    transform = transform_at_work() if backend in (None, "native") else None
    if transform is None:
        return backend
    from .refusals import check_transform

    check_transform(backend, transform, query, key)
    return "eager"


def _outside_graphs(module: nn.Module, query: Tensor, key: Any) -> AttentionFunction | None:
    outside: AttentionFunction | None = None
    streams: Any = getattr(key, "streams", None)
    if getattr(module, BLOCKS, False):
        outside = use_plan_runs_outside_graphs
    elif streams is not None and not (query.shape[2] == 1 and streams.steps_in_graphs):
        outside = streaming_heads_run_outside_graphs
    return outside


@torch.compiler.disable  # type: ignore[untyped-decorator]
def use_plan_runs_outside_graphs(attention: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Calls an attention function outside the graph; with `fullgraph=True` torch's error shows this function's name."""
    return attention(*args, **kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def streaming_heads_run_outside_graphs(attention: Any, /, *args: Any, **kwargs: Any) -> Any:
    """The same for a cache whose heads keep tokens of their own: what is written and read is counted on the host."""
    return attention(*args, **kwargs)
