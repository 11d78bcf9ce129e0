"""Batches whose sequences have one length."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .arguments import check_tensors, options
from .attention.structure import MaskStructure
from .attention.tracing import transform_at_work
from .operators import within
from .run import attend


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """Attention of a batch without padding, with gradients.

    Args:
        q: `[batch, q_len, heads, head_dim]`.
        k: `[batch, kv_len, num_kv_heads, head_dim]`; `heads` is a multiple of `num_kv_heads`.
        v: `[batch, kv_len, num_kv_heads, head_dim_v]`.
        dropout_p: 0; anything else is refused.
        softmax_scale: Factor on the scores, `head_dim ** -0.5` by default.
        causal: A query sees no key behind its own position; the last query stands at the last key.
        window_size: Keys seen to the left and to the right of a query beside its own; -1 for all.
        softcap: `c`: scores become `c * tanh(score / c)`; None or 0 for none.
        alibi_slopes: None; anything else is refused.
        deterministic: The native kernels always are; refused for gradients on CUDA devices.
        return_attn_probs: Also return the log-sum-exp, and None where FlashAttention returns weights for its tests.
        s_aux, learnable_sink: `[heads]` learned sinks, one more column of the softmax without a value.

    Returns:
        `[batch, q_len, heads, head_dim_v]`; with `return_attn_probs` also `[batch, heads, q_len]` in nats and None.

    Raises:
        ValueError: Tensors that do not belong together, or a keyword that asks for what the kernels do not compute.
    """
    check_tensors(q, k, v, 4)
    asked = options(
        q, causal, window_size, softmax_scale, softcap, s_aux, learnable_sink, dropout_p, deterministic,
        {"alibi_slopes": alibi_slopes},
    )  # fmt: skip
    batch, q_len, kv_len = q.shape[0], q.shape[1], k.shape[1]
    if torch.compiler.is_compiling():
        structure = _structure(batch, q_len, kv_len, asked.causal, asked.window)
    elif transform_at_work() is None:
        structure = _shared_structure(batch, q_len, kv_len, asked.causal, asked.window)
    else:
        # of operations on tensors: a graph that torch.jit.trace records may be run with other lengths
        places = torch.arange(q_len, device=q.device)[:, None] + (kv_len - q_len)
        mask = within(places, torch.arange(kv_len, device=q.device)[None], asked)
        structure = MaskStructure(batch, q_len, kv_len, mask=mask[None, None])
    query, key, value = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    result = attend(structure, query, key, value, asked, need_lse=return_attn_probs)
    return (result.out, result.lse, None) if return_attn_probs else result.out


def _structure(batch: int, q_len: int, kv_len: int, causal: bool, window: int | None) -> MaskStructure:
    """The last query stands at the last key."""
    return MaskStructure(batch, q_len, kv_len, causal, kv_len - q_len, window)


# The layers of a forward pass, and passes of like shape, share what was found out for the first of them.
_shared_structure = functools.lru_cache(maxsize=64)(_structure)
