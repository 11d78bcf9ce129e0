"""One attention call: tensors, structure and the few numbers that change the mathematics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .structure import CallStructure

__all__ = ["AttentionRequest", "AttentionResult", "CallSpec"]


@dataclass(frozen=True, eq=False)
class AttentionRequest:
    """What a backend is asked to compute.

    Attributes:
        query: `[batch, heads, q_len, head_dim]`.
        key: `[batch, num_kv_heads, kv_len, head_dim]`; `heads` is a multiple of `num_kv_heads`.
        value: `[batch, num_kv_heads, kv_len, head_dim_v]`.
        structure: Which key each query may see.
        scaling: Factor on the scores; multiplies.
        dropout: Probability of dropping an attention weight (training).
        softcap: `c`: scores become `c * tanh(score / c)` before masking.
        sink_logits: `[heads]` learned sinks: one more column of the softmax that carries no value.
        bias: Added to the scores; float, broadcastable to `[batch, heads, q_len, kv_len]`; may need a gradient.
        need_lse: Also return the log-sum-exp of each row.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    structure: CallStructure
    scaling: float
    dropout: float = 0.0
    softcap: float | None = None
    sink_logits: Tensor | None = None
    bias: Tensor | None = None
    need_lse: bool = False

    def with_tensors(
        self, query: Tensor, key: Tensor, value: Tensor, structure: CallStructure | None = None
    ) -> AttentionRequest:
        """The same request about other tensors."""
        return AttentionRequest(
            query,
            key,
            value,
            self.structure if structure is None else structure,
            self.scaling,
            self.dropout,
            self.softcap,
            self.sink_logits,
            self.bias,
            self.need_lse,
        )


class AttentionResult(NamedTuple):
    """`out` `[batch, q_len, heads, head_dim_v]` in the query's dtype; `lse` `[batch, heads, q_len]` fp32 (nats) or None.

    Rows that see no key are zero in `out` and -inf in `lse`.
    """

    out: Tensor
    lse: Tensor | None = None


class CallSpec(NamedTuple):
    """The facts of a call on which the choice of a backend may depend: hashable, without data."""

    device: str
    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    groups: int
    kind: str
    windowed: bool
    window_sinks: bool
    decode: bool
    needs_grad: bool
    dropout: bool
    softcap: bool
    sink_logits: bool
    bias: bool
    need_lse: bool
    compiling: bool

    @classmethod
    def of(cls, request: AttentionRequest) -> CallSpec:
        """The spec of a request."""
        q, k, v = request.query, request.key, request.value
        grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        if torch.is_grad_enabled() and not grad:
            grad = any(t is not None and t.requires_grad for t in (request.bias, request.sink_logits))
        kind, compiling = request.structure.kind, torch.compiler.is_compiling()
        if kind == "ragged" and not compiling and q.device.type != "meta" and request.structure.segments() is None:
            kind = "irregular"  # padding with holes is no better than a dense mask
        return cls(
            device=q.device.type,
            dtype=q.dtype,
            head_dim=q.shape[3],
            head_dim_v=v.shape[3],
            groups=q.shape[1] // k.shape[1],
            kind=kind,
            windowed=request.structure.windowed,
            window_sinks=request.structure.sinks > 0,
            decode=q.shape[2] == 1,
            needs_grad=grad,
            dropout=request.dropout > 0,
            softcap=request.softcap is not None,
            sink_logits=request.sink_logits is not None,
            bias=request.bias is not None,
            need_lse=request.need_lse,
            compiling=compiling,
        )
