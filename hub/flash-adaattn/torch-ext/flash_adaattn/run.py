"""One call from tensors and a structure to the output, by the backend that the device and the call ask for."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .arguments import Options
from .attention.call import AttentionCall, AttentionResult
from .attention.runs import Runs, aligned_runs
from .attention.structure import MaskStructure
from .attention.tracing import transform_at_work
from .backends import select
from .patches.call.refusals import check_transform


def attend(
    structure: MaskStructure, query: Tensor, key: Tensor, value: Tensor, asked: Options, *, need_lse: bool = False
) -> AttentionResult:
    """Attention `[batch, q_len, heads, head_dim_v]` of heads-first tensors, with the log-sum-exp where asked for.

    Args:
        structure: Which key each query sees.
        query: `[batch, heads, q_len, head_dim]`.
        key, value: `[batch, num_kv_heads, kv_len, head_dim]`, values of any head size.
        asked: The keywords of the call.
        need_lse: Also return the log-sum-exp, `[batch, heads, q_len]`.
    """
    transform = None if torch.compiler.is_compiling() else transform_at_work()
    if not torch.compiler.is_compiling() and transform is None:
        structure = structure.simplified()
    call = AttentionCall(
        query, key, value, structure, asked.scaling,
        softcap=asked.softcap, sink_logits=asked.sink_logits, need_lse=need_lse,
    )  # fmt: skip
    if transform is not None:
        check_transform(None, transform, query, key)
    # torch's own operations, where transforms are to see them
    result = select.attend(call, None if transform is None else "eager")
    if need_lse and result.lse is None:
        raise RuntimeError("lse: the backend that serves this call returned none; do not ask for it")
    return result


@functools.lru_cache(maxsize=64)
def packed_runs(
    cu_q: tuple[int, ...], cu_k: tuple[int, ...], q_total: int, k_total: int, causal: bool, window: int | None
) -> Runs:
    """Sequences packed one behind the other in one row; the last query of each stands at its last key.

    Args:
        cu_q, cu_k, q_total, k_total: As in `aligned_runs`.
        causal, window: Hold within each sequence.
    """
    return Runs.of(aligned_runs(cu_q, cu_k, q_total, k_total, causal), 1, q_total, k_total, causal, window)
