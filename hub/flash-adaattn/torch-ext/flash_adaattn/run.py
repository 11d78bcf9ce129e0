"""One call from tensors and a structure to the output, by the backend that the device and the call ask for."""

from __future__ import annotations

import torch
from torch import Tensor

from .arguments import Options
from .attention.request import AttentionRequest, AttentionResult
from .attention.structure import CallStructure
from .backends import select
from .backends.base import FastCall, spec_of

__all__ = ["attend", "lse_of"]


def attend(
    structure: CallStructure,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    asked: Options,
    *,
    need_lse: bool = False,
) -> AttentionResult:
    """Attention `[batch, q_len, heads, head_dim_v]` of heads-first tensors, with the log-sum-exp where asked for.

    Args:
        structure: Which key each query sees.
        query: `[batch, heads, q_len, head_dim]`.
        key, value: `[batch, num_kv_heads, kv_len, head_dim]`, values of any head size.
        asked: The keywords of the call.
        need_lse: Also return the log-sum-exp, `[batch, heads, q_len]`.
    """
    if asked.softcap is None and asked.sink_logits is None and not need_lse and asked.scaling > 0:
        return AttentionResult(_attend_plainly(structure, query, key, value, asked.scaling))
    request = AttentionRequest(
        query, key, value, structure, asked.scaling,
        softcap=asked.softcap, sink_logits=asked.sink_logits, need_lse=need_lse,
    )  # fmt: skip
    return select.attend(request)


def _attend_plainly(
    structure: CallStructure, query: Tensor, key: Tensor, value: Tensor, scaling: float
) -> Tensor:
    """The same without extras: what was chosen for a structure's first call serves its later ones."""
    if torch.compiler.is_compiling():
        request = AttentionRequest(query, key, value, structure, scaling)
        return select.attend(request).out
    flows = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    facts = (
        flows, query.dtype, key.dtype, value.dtype, query.device, query.shape, key.shape, value.shape
    )  # fmt: skip
    kept: tuple[object, FastCall | None] | None = structure.ready
    if kept is None or kept[0] != facts:
        request = AttentionRequest(query, key, value, structure, scaling)
        spec = spec_of(request)
        kept = structure.ready = (facts, select.choose(spec).fast_call(spec, request))
    call = kept[1]
    if call is not None:
        return call(query, key, value, scaling)
    return select.attend(AttentionRequest(query, key, value, structure, scaling)).out


def lse_of(result: AttentionResult) -> Tensor:
    """The log-sum-exp of a result that was to have one.

    Raises:
        RuntimeError: It has none.
    """
    if result.lse is None:
        raise RuntimeError("lse: the backend that serves this call returned none; do not ask for it")
    return result.lse
