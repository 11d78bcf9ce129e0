"""Sequences of different lengths, packed one behind the other without padding."""

from __future__ import annotations

import torch
from torch import Tensor

from .arguments import check_tensors, options
from .attention.tracing import transform_at_work
from .operators import masked_varlen, traced_varlen
from .paged import gathered
from .patches.call.refusals import check_untransformed
from .run import attend, packed_runs


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    page_table: Tensor | None = None,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """Attention within each of several packed sequences, with gradients.

    Args:
        q: `[q_tokens, heads, head_dim]`; tokens behind the last sequence belong to none, their output is zero.
        k: `[k_tokens, num_kv_heads, head_dim]`, or `[pages, page_size, num_kv_heads, head_dim]` with a block table.
        v: `[k_tokens, num_kv_heads, head_dim_v]`, or in pages.
        cu_seqlens_q, cu_seqlens_k: `[sequences + 1]` running sums of lengths, starting with 0.
        max_seqlen_q, max_seqlen_k: Not needed: the lengths are read from the sums.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
            s_aux, learnable_sink: As in `flash_attn_func`, per sequence.
        block_table, page_table: `[sequences, pages_per_sequence]` pages of each sequence's keys and values.

    Returns:
        `[q_tokens, heads, head_dim_v]`; with `return_attn_probs` also `[heads, q_tokens]` in nats and None.

    Raises:
        ValueError: Tensors that do not belong together, or a keyword that asks for what the kernels do not compute.
    """
    del max_seqlen_q, max_seqlen_k
    table = block_table if block_table is not None else page_table
    if table is not None:
        check_untransformed("flash_attn_varlen_func with block_table")
        k, v = gathered(k, v, table, cu_seqlens_k.tolist())
    check_tensors(q, k, v, 3)
    asked = options(
        q, causal, window_size, softmax_scale, softcap, s_aux, learnable_sink, dropout_p, deterministic,
        {"alibi_slopes": alibi_slopes},
    )  # fmt: skip
    if torch.compiler.is_compiling():
        out, lse = traced_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, asked, need_lse=return_attn_probs)
    elif transform_at_work() is not None:
        out, lse = masked_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, asked, need_lse=return_attn_probs)
    else:
        # the packed sequences as one batch row
        sums = tuple(cu_seqlens_q.tolist())
        sums_k = sums if cu_seqlens_k is cu_seqlens_q else tuple(cu_seqlens_k.tolist())
        structure = packed_runs(sums, sums_k, q.shape[0], k.shape[0], asked.causal, asked.window)
        query, key, value = (t.unsqueeze(0).transpose(1, 2) for t in (q, k, v))
        row = attend(structure, query, key, value, asked, need_lse=return_attn_probs)
        out, lse = row.out.squeeze(0), None if row.lse is None else row.lse.squeeze(0)
    return (out, lse, None) if return_attn_probs else out
