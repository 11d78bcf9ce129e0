"""One attention call: tensors, structure and the few numbers that change the mathematics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .structure import CallStructure

__all__ = ["AttentionRequest", "AttentionResult", "CallSpec"]


# Not frozen: a frozen dataclass costs microseconds to make, and one is made in every layer.
@dataclass(eq=False, slots=True)
class AttentionRequest:
    """What a backend is asked to compute. Nobody changes one.

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

    def __post_init__(self) -> None:
        heads, kv_heads = self.query.shape[1], self.key.shape[1]
        if not kv_heads or heads % kv_heads:
            # the kernels divide by it
            raise ValueError(
                f"key: got {kv_heads} heads for {heads} query heads, expected a divisor of {heads}; repeat or drop "
                "heads so that every key head serves as many query heads"
            )

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
    """What a backend answers.

    Attributes:
        out: `[batch, q_len, heads, head_dim_v]` in the query's dtype.
        lse: `[batch, heads, q_len]`, fp32, nats; None where it was not asked for.

    Rows that see no key are zero in `out` and -inf in `lse`.
    """

    out: Tensor
    lse: Tensor | None = None


# Pairs of queries and keys up to which nobody need know whether padding has holes. A CUDA device masks more of them in
# the time in which the host looks.
_SMALL_PAIRS = 1 << 14
_SMALL_PAIRS_CUDA = 1 << 17

# Bytes of keys and values beyond which one query on a processor reads them from memory, and the number of keys from
# which a CUDA device has to share them out among its multiprocessors.
_CACHED_BYTES = 1 << 24
_SHARED_KEYS = 384


class CallSpec(NamedTuple):
    """The facts of a call on which the choice of a backend may depend: hashable, without data.

    `kind` is that of the structure; or `holes` where padding on the CPU is not made of runs, `small` where it is not
    looked at on CUDA since a mask costs less. `streamed` is one query per sequence over so many keys and values that
    reading them decides: more than a processor's caches hold, or than one multiprocessor reads in a launch's time.
    """

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
    streamed: bool = False

    def words(self) -> str:
        """The facts in words, those that are false left out."""
        dtype = str(self.dtype).removeprefix("torch.")
        values = "" if self.head_dim_v == self.head_dim else f" and {self.head_dim_v} for values"
        heads = "1 query head" if self.groups == 1 else f"{self.groups} query heads"
        facts = [
            self.kind,
            dtype,
            f"head_dim {self.head_dim}{values}",
            f"{heads} per key/value head",
            self.device,
        ]
        flags = {
            "windowed": self.windowed,
            "with window sinks": self.window_sinks,
            "one query": self.decode,
            "with gradients": self.needs_grad,
            "with dropout": self.dropout,
            "with softcap": self.softcap,
            "with sink logits": self.sink_logits,
            "with a bias": self.bias,
            "with the log-sum-exp": self.need_lse,
            "compiled": self.compiling,
        }
        return ", ".join([*facts, *(name for name, holds in flags.items() if holds)])

    @classmethod
    def of(cls, request: AttentionRequest, *, look: bool = False) -> CallSpec:
        """The spec of a request; `look` at padding however small, for a backend that was asked for by name."""
        # Runs in every layer: positional, nothing read twice, and no torch.device made where none is needed.
        q, k, v, structure = request.query, request.key, request.value, request.structure
        bias, sink_logits = request.bias, request.sink_logits
        grad = torch.is_grad_enabled() and (
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or (bias is not None and bias.requires_grad)
            or (sink_logits is not None and sink_logits.requires_grad)
        )
        device = "cpu" if q.is_cpu else q.device.type
        kind, compiling = structure.kind, torch.compiler.is_compiling()
        if kind == "ragged" and not compiling and device != "meta":
            pairs = structure.batch * structure.q_len * structure.kv_len
            if device == "cuda" and pairs <= _SMALL_PAIRS_CUDA and structure.q_len > 1 and not look:
                kind = "small"
            elif (pairs > _SMALL_PAIRS or device != "cpu") and structure.segments() is None:
                # padding with holes: kernels that walk runs are no better off than with a dense mask
                kind = "irregular" if device != "cpu" else "holes"
        _, heads, q_len, head_dim = q.shape
        streamed = False
        if q_len == 1 and not compiling:
            size = (k.numel() + v.numel()) * k.dtype.itemsize
            streamed = k.shape[2] >= _SHARED_KEYS if device == "cuda" else size > _CACHED_BYTES
        return cls(
            device,
            q.dtype,
            head_dim,
            v.shape[3],
            heads // k.shape[1],
            kind,
            structure.window is not None and structure.windowed,
            structure.sinks > 0,
            q_len == 1,
            grad,
            request.dropout > 0,
            request.softcap is not None,
            sink_logits is not None,
            bias is not None,
            request.need_lse,
            compiling,
            streamed,
        )
