"""What FlashAttention's keywords mean, and which of them are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Options(NamedTuple):
    """The keywords of one call, read.

    Attributes:
        causal: A query sees no key behind its own position; the last query stands at the last key.
        window: `W`: causal sees the last `W` keys, the query's own counted; bidirectional `W - 1` to either side.
        scaling: Factor on the scores.
        softcap: `c`: scores become `c * tanh(score / c)`; None for none.
        sink_logits: `[heads]` learned sinks, or None.
    """

    causal: bool
    window: int | None
    scaling: float
    softcap: float | None
    sink_logits: Tensor | None


def options(
    query: Tensor,
    causal: bool,
    window_size: tuple[int, int],
    softmax_scale: float | None,
    softcap: float | None,
    s_aux: Tensor | None,
    learnable_sink: Tensor | None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    refused: Mapping[str, Any] | None = None,
) -> Options:
    """Reads the keywords of a call.

    Args:
        query: Queries, `[..., heads, head_dim]`.
        causal, window_size, softmax_scale, softcap: As in FlashAttention.
        s_aux, learnable_sink: `[heads]` learned sinks by either of the names in use.
        dropout_p, deterministic: See Raises.
        refused: Further keywords by name, which must be None or False.

    Raises:
        ValueError: A keyword asks for what the kernels do not compute.
    """
    if dropout_p:
        raise ValueError(
            f"dropout_p: got {dropout_p}, expected 0: these kernels have no dropout; set the attention dropout of "
            "the model's configuration (attention_dropout, attention_probs_dropout_prob) to 0, or train with "
            "attn_implementation='sdpa'"
        )
    for name, value in (refused or {}).items():
        if value is not None and value is not False:
            raise ValueError(f"{name}: got {type(value).__name__}, expected None: these kernels do not take it")
    if deterministic and query.is_cuda and query.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "deterministic: got True with gradients on a CUDA device, whose backward pass adds in any order; "
            "use torch.use_deterministic_algorithms with attn_implementation='eager'"
        )
    if s_aux is not None and learnable_sink is not None:
        raise ValueError("learnable_sink: got it beside s_aux, which is another name for it; pass one of them")
    sinks = s_aux if s_aux is not None else learnable_sink
    heads, head_dim = query.shape[-2:]
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"s_aux: got shape {tuple(sinks.shape)}, expected one learned sink per query head ({heads},)")
    scaling = head_dim**-0.5 if softmax_scale is None else softmax_scale
    left, right = window_size  # inclusive; -1 is no bound
    if causal or right == 0:
        return Options(True, None if left < 0 else left + 1, scaling, softcap or None, sinks)
    if left != right and (left >= 0 or right >= 0):
        raise ValueError(
            f"window_size: got {tuple(window_size)} without causality, expected equal bounds, (-1, -1) or a right "
            "bound of 0"
        )
    return Options(False, None if left < 0 else left + 1, scaling, softcap or None, sinks)


def check_tensors(query: Tensor, key: Tensor, value: Tensor, dims: int) -> None:
    """Refuses tensors that do not belong together: the kernels read memory by these shapes.

    Args:
        query: `[..., heads, head_dim]` of `dims` dimensions.
        key: `[..., num_kv_heads, head_dim]`.
        value: `[..., num_kv_heads, head_dim_v]`.
        dims: 4 for batches, 3 for packed rows.

    Raises:
        ValueError: Dimensions, head sizes, dtypes or devices differ, or the heads are not grouped.
    """
    q_shape, k_shape, v_shape = query.shape, key.shape, value.shape
    if not len(q_shape) == len(k_shape) == len(v_shape) == dims:
        raise ValueError(
            f"q, k, v: got {len(q_shape)}, {len(k_shape)} and {len(v_shape)} dimensions, expected {dims} each"
        )
    if q_shape[-1] != k_shape[-1] or k_shape[:-1] != v_shape[:-1]:
        raise ValueError(
            f"q, k, v: got shapes {tuple(q_shape)}, {tuple(k_shape)} and {tuple(v_shape)}, expected one head size of "
            "queries and keys, and keys and values of the same tokens and heads"
        )
    if dims == 4 and q_shape[0] != k_shape[0]:
        raise ValueError(f"k: got a batch of {k_shape[0]}, expected that of the queries, {q_shape[0]}")
    if not k_shape[-2] or q_shape[-2] % k_shape[-2]:
        raise ValueError(f"k: got {k_shape[-2]} heads for {q_shape[-2]} query heads, expected a divisor")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"q, k, v: got {query.dtype}, {key.dtype} and {value.dtype}, expected one dtype")
    if not query.device == key.device == value.device:
        raise ValueError(
            f"q, k, v: got tensors on {query.device}, {key.device} and {value.device}, expected one device"
        )
