"""Decoding with a cache of keys and values that this call also writes to."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from .arguments import Options, check_tensors, options
from .attention.runs import Runs
from .attention.structure import Segment
from .paged import attend_pages, gathered, write_pages
from .patches.call.refusals import check_untransformed
from .run import attend, packed_runs


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Tensor | None = None,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over cached keys and values, to which `k` and `v` are added first, in place; without gradients.

    Args:
        q: `[sequences, q_len, heads, head_dim]`; the last query stands at the last token.
        k_cache: `[sequences, room, num_kv_heads, head_dim]`, or `[pages, page_size, num_kv_heads, head_dim]` with a
            block table.
        v_cache: Values in the same layout.
        k, v: `[sequences, new, num_kv_heads, head_dim]` tokens to add.
        rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, alibi_slopes: None; anything else is refused.
        cache_seqlens: Tokens that the cache holds before this call, one number or `[sequences]`; all of `room` by
            default. A negative length marks a row that holds no sequence: nothing is written, its output is zero.
        block_table, page_table: `[sequences, pages_per_sequence]` pages of each sequence.
        softmax_scale, causal, window_size, softcap, s_aux, learnable_sink: As in `flash_attn_func`.
        num_splits: Not needed.
        return_softmax_lse: Also return the log-sum-exp.

    Returns:
        `[sequences, q_len, heads, head_dim_v]`, with `return_softmax_lse` also `[sequences, heads, q_len]` in nats.

    Raises:
        ValueError: Tensors that do not belong together, or a keyword that asks for what the kernels do not compute.
    """
    del num_splits
    refused = {
        "rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "cache_batch_idx": cache_batch_idx,
        "cache_leftpad": cache_leftpad, "alibi_slopes": alibi_slopes,
    }  # fmt: skip
    check_untransformed("flash_attn_with_kvcache")
    asked = options(q, causal, window_size, softmax_scale, softcap, s_aux, learnable_sink, refused=refused)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k_cache, v_cache, k, v)):
        raise ValueError(
            "flash_attn_with_kvcache: got tensors that need gradients; decode under torch.no_grad(), or train with "
            "flash_attn_func"
        )
    table = block_table if block_table is not None else page_table
    if (k is None) != (v is None):
        raise ValueError("k, v: got one of them, expected both or none")
    sequences, q_len = q.shape[:2]
    check_tensors(q if table is None else q[:1].expand(k_cache.shape[0], -1, -1, -1), k_cache, v_cache, 4)
    if table is not None and (table.ndim != 2 or table.shape[0] != sequences):
        raise ValueError(
            f"block_table: got shape {tuple(table.shape)}, expected [sequences, pages] with {sequences} sequences"
        )
    for name, fresh, cache in (("k", k, k_cache), ("v", v, v_cache)):
        expected = (sequences, *cache.shape[2:])
        if fresh is not None and ((fresh.shape[0], *fresh.shape[2:]) != expected or fresh.dtype != cache.dtype):
            raise ValueError(
                f"{name}: got shape {tuple(fresh.shape)} in {fresh.dtype}, expected [sequences, new, *{expected[1:]}] "
                f"with {expected[0]} sequences in {cache.dtype}, as in the cache"
            )
    if isinstance(cache_seqlens, Tensor):
        if cache_seqlens.shape != (sequences,):
            raise ValueError(f"cache_seqlens: got shape {tuple(cache_seqlens.shape)}, expected ({sequences},)")
        held: list[int] = cache_seqlens.tolist()
    else:
        if cache_seqlens is None and table is not None:
            raise ValueError("cache_seqlens: got None with a block table, expected the length of each sequence")
        held = [k_cache.shape[1] if cache_seqlens is None else cache_seqlens] * sequences
    new = 0 if k is None else k.shape[1]
    lengths = [length + new if length >= 0 else 0 for length in held]
    if table is not None:
        if k is not None and v is not None:
            write_pages(k_cache, k, table, held)
            write_pages(v_cache, v, table, held)
        if q_len == 1:
            out, lse = attend_pages(q, k_cache, v_cache, table, lengths, asked)
        else:
            out, lse = _attend_gathered(q, k_cache, v_cache, table, lengths, asked)
    else:
        if k is not None and v is not None:
            _write(k_cache, k, held)
            _write(v_cache, v, held)
        structure = _cached_runs(tuple(lengths), q_len, k_cache.shape[1], asked.causal, asked.window)
        query, key, value = (t.transpose(1, 2) for t in (q, k_cache, v_cache))
        out, lse = attend(structure, query, key, value, asked, need_lse=True)
    return (out, lse) if return_softmax_lse else out


def _write(cache: Tensor, fresh: Tensor, held: Sequence[int]) -> None:
    """Writes new tokens behind those that the cache holds, in place."""
    room, new = cache.shape[1], fresh.shape[1]
    if max(held, default=0) + new > room:
        raise ValueError(f"cache_seqlens: got up to {max(held)} tokens and {new} new ones in a cache of {room}")
    for row, length in enumerate(held):
        if length >= 0:
            cache[row, length : length + new] = fresh[row]


def _attend_gathered(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, table: Tensor, lengths: Sequence[int], asked: Options
) -> tuple[Tensor, Tensor]:
    """Several queries per sequence: its pages are read once into one row."""
    sequences, q_len, heads, _ = q.shape
    cu_k = [0]
    for length in lengths:
        cu_k.append(cu_k[-1] + length)
    key, value = gathered(k_pages, v_pages, table, cu_k)
    cu_q = tuple(range(0, (sequences + 1) * q_len, q_len))
    structure = packed_runs(cu_q, tuple(cu_k), sequences * q_len, cu_k[-1], asked.causal, asked.window)
    query, key, value = (t.unsqueeze(0).transpose(1, 2) for t in (q.flatten(0, 1), key, value))
    out, lse = attend(structure, query, key, value, asked, need_lse=True)
    return out.view(sequences, q_len, heads, -1), lse.view(heads, sequences, q_len).transpose(0, 1)


@functools.lru_cache(maxsize=64)
def _cached_runs(lengths: tuple[int, ...], q_len: int, room: int, causal: bool, window: int | None) -> Runs:
    """One run for each sequence of a cache.

    Raises:
        ValueError: A length beyond the cache.
    """
    if max(lengths, default=0) > room:
        raise ValueError(f"cache_seqlens: got {max(lengths)} tokens, expected at most {room}")
    runs = []
    for row, length in enumerate(lengths):
        offset = length - q_len
        first = -offset if causal and offset < 0 else 0  # queries before the first key see nothing
        if length and first < q_len:
            runs.append(Segment(row, first, q_len - first, 0, length, offset + first))
    return Runs.of(runs, len(lengths), q_len, room, causal, window)
