"""One attention call: tensors, structure and the few numbers that change the mathematics."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .structure import CallStructure, Facts
from .tracing import holds_no_memory

if TYPE_CHECKING:
    from .heads import HeadRules
    from .stored import StoredKV


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
        per_head: What each key/value head computes separately; None where all do the same.
        stored: What turns key and value into numbers, where they are the codes that a cache stores.
        layer: Number of the layer that asks, told to listeners.
        backend: Backend that was asked for by name, told to listeners.
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
    per_head: HeadRules | None = None
    stored: StoredKV | None = None
    layer: int | None = None
    backend: str | None = None

    def __post_init__(self) -> None:
        """Bring the tensors into one batch, and refuse what does not belong together."""
        check_tensors(self.query, self.key, self.value)
        if not self.query.shape[0] == self.key.shape[0] == self.value.shape[0]:
            self.query, self.key, self.value = in_one_batch(self.query, self.key, self.value)
        check_dtype("query", self.query)
        if not self.query.device == self.key.device == self.value.device:
            raise other_devices(self.query, self.key, self.value)
        if self.stored is not None:
            self.stored.check_device(self.query.device)
        elif not self.query.dtype == self.key.dtype == self.value.dtype:
            raise ValueError(
                f"query, key, value: got {self.query.dtype}, {self.key.dtype} and {self.value.dtype}, expected one "
                "dtype; cast them to the query's, key.to(query.dtype)"
            )
        if not self.query.shape[3] and not self.key.shape[3]:  # every product is 0, as of one channel of zeros
            self.query, self.key = F.pad(self.query, (0, 1)), F.pad(self.key, (0, 1))
        batch, heads, q_len, dim = self.query.shape
        _, kv_heads, kv_len, key_dim = self.key.shape
        if not kv_heads or heads % kv_heads:
            # the kernels divide by it
            raise ValueError(
                f"key: got {kv_heads} heads for {heads} query heads, expected a divisor of {heads}; repeat or drop "
                "heads, as every key head must belong to the same number of query heads"
            )
        if key_dim != dim or self.value.shape[1] != kv_heads or self.value.shape[2] != kv_len:
            raise ValueError(
                f"key, value: got shapes {tuple(self.key.shape)} and {tuple(self.value.shape)} for queries of shape "
                f"{tuple(self.query.shape)}; expected keys of head_dim {dim}, and values in as many heads and at as "
                "many positions as keys"
            )
        structure = self.structure
        if structure.q_len != q_len or structure.kv_len != kv_len or structure.batch != batch:
            raise ValueError(
                f"structure: made for a batch of {structure.batch} with {structure.q_len} queries and "
                f"{structure.kv_len} keys, got a batch of {batch} with {q_len} queries and {kv_len} keys"
            )
        extents = (batch, heads, q_len, kv_len)
        if structure.mask is not None and not torch.compiler.is_compiling() and not structure.mask_covers(heads):
            raise ValueError(
                f"structure.mask: got shape {tuple(structure.mask.shape)}, expected one that broadcasts to {extents}, "
                "which is [batch, heads, q_len, kv_len]"
            )
        if self.per_head is not None:
            self.per_head.check_fit(kv_heads, dim)
        if self.dropout or self.softcap is not None:
            self._check_numbers()
        if self.sink_logits is not None:
            self._check_dense("sink_logits", self.sink_logits)
            if self.sink_logits.shape != (heads,):
                raise ValueError(
                    f"sink_logits: got shape {tuple(self.sink_logits.shape)}, expected one for each of the {heads} "
                    "query heads; slice those of the heads that this device computes"
                )
        if self.bias is not None:
            self._check_dense("bias", self.bias)
            self.bias = broadcast_to_scores("bias", self.bias, extents)

    def _check_dense(self, name: str, tensor: Tensor) -> None:
        dense = isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.is_floating_point()
        if not dense or tensor.device != self.query.device:
            got = f"{tensor.dtype} on {tensor.device}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"{name}: got {got}, expected a dense floating-point tensor on {self.query.device}")

    def _check_numbers(self) -> None:
        if not 0.0 <= self.dropout <= 1.0:
            raise ValueError(f"dropout: got {self.dropout}, expected a probability from 0 to 1; 0 drops nothing")
        softcap = self.softcap
        if softcap is not None and not (isinstance(softcap, (float, int)) and 0.0 < softcap < float("inf")):
            raise ValueError(
                f"softcap: got {self.softcap}, expected a positive number, or None for no bound on the scores"
            )

    @property
    def asks_nothing(self) -> bool:
        """Whether there is no row, no query, no key or no channel: kernels divide by each of them."""
        return not (self.query.numel() and self.key.numel() and self.value.numel())

    def with_tensors(
        self, query: Tensor, key: Tensor, value: Tensor, structure: CallStructure | None = None
    ) -> AttentionRequest:
        """The same request about other tensors."""
        structure = self.structure if structure is None else structure
        return AttentionRequest(
            query, key, value, structure, self.scaling, self.dropout, self.softcap, self.sink_logits, self.bias,
            self.need_lse, self.per_head, self.stored,
        )  # fmt: skip

    def widened(self) -> AttentionRequest:
        """The same request with keys and values as numbers: itself, unless they are codes of a cache."""
        if self.stored is None:
            return self
        dtype = self.query.dtype
        key, value = self.stored.keys(self.key, dtype), self.stored.values(self.value, dtype)
        return replace(self, key=key, value=value, stored=None)


def format_of(value: Tensor) -> str:
    """The name of the format that a request's codes of values are in."""
    return "k8v4" if value.dtype is torch.uint8 else "int8"


def head_dim_of(value: Tensor) -> int:
    """Channels of a value, also of one in four bits."""
    return value.shape[3] * (2 if value.dtype is torch.uint8 else 1)


def check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Refuse tensors that are not dense `[batch, heads, length, head_dim]`."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, expected [batch, heads, length, head_dim]")
        if tensor.layout is not torch.strided:
            raise ValueError(
                f"{name}: got a tensor of layout {tensor.layout}, expected a dense one (torch.strided); make it one "
                "with .to_dense()"
            )


def check_dtype(name: str, tensor: Tensor) -> None:
    """Refuse integers, and floats of eight bits, whose scales attention is not told."""
    if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
        raise ValueError(
            f"{name}: got {tensor.dtype}, expected a floating-point dtype of 16 bits or more; cast it with .float()"
        )


def other_devices(query: Tensor, key: Tensor, value: Tensor) -> ValueError:
    """The error of a call whose tensors do not lie on one device."""
    return ValueError(
        f"query, key, value: got tensors on {query.device}, {key.device} and {value.device}, "
        "expected one device; move them to the query's, key.to(query.device)"
    )


def in_one_batch(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value in one batch, without a copy: learned queries, say, come once for the whole batch.

    Batches that are neither equal nor 1 are refused.
    """
    batches = {query.shape[0], key.shape[0], value.shape[0]} - {1}
    if len(batches) > 1:
        raise ValueError(
            f"query, key, value: got batches of {query.shape[0]}, {key.shape[0]} and {value.shape[0]}, expected one "
            "batch, or 1 for what holds for every row"
        )
    batch = batches.pop() if batches else 1
    return query.expand(batch, -1, -1, -1), key.expand(batch, -1, -1, -1), value.expand(batch, -1, -1, -1)


def broadcast_to_scores(name: str, bias: Tensor, extents: tuple[int, ...]) -> Tensor:
    """A bias with all four dimensions; one that does not broadcast to the scores is refused."""
    shape = (1,) * (4 - bias.dim()) + tuple(bias.shape)
    if len(shape) > 4 or any(size not in (1, extent) for size, extent in zip(shape, extents, strict=True)):
        raise ValueError(
            f"{name}: got shape {tuple(bias.shape)}, expected one that broadcasts to {extents}, which is "
            "[batch, heads, q_len, kv_len]"
        )
    return bias if bias.dim() == 4 else bias.reshape(shape)


def narrowed(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers that are added to scores, in a dtype; finite ones stay finite there, as an infinite one hides a key."""
    most = torch.finfo(dtype).max
    if torch.finfo(numbers.dtype).max > most:
        numbers = torch.where(numbers.isinf(), numbers, numbers.clamp(-most, most))
    return numbers.to(dtype)


class AttentionResult(NamedTuple):
    """What a backend answers; rows that see no key are zero in `out` and -inf in `lse`.

    `out` is `[batch, q_len, heads, head_dim_v]` in the query's dtype, `lse` `[batch, heads, q_len]` in fp32, nats; None
    where it was not asked for.
    """

    out: Tensor
    lse: Tensor | None = None


_LIGHT_PRODUCTS = 1 << 33
"""Products of numbers, pairs of all heads times their channels, below which training is light."""


class CallSpec(NamedTuple):
    """The facts of a call on which the choice of a backend may depend: hashable, without data.

    `kind` is that of the structure, or `irregular` if the padding has holes, so that rows are not contiguous runs.
    `holes` says whether it has, None if the padding was not read; `aligned`: the queries of every run end with its last
    key, or were not looked at.
    `head_windows` and `head_precision` say what `HeadRules` ask for: any window, and the precision of the products,
    `mixed` where heads differ; `head_until`, whether these rules end with a position of the sequence.
    `stored` names the format that a cache keeps keys and values in, None where they are plain numbers.
    Sizes are rounded, so that few specs differ, and 0 where no choice depends on them: `packed`, keys of the longest
    run where every query and key was seen to lie in one, as in a packed row, down to a power of two; on CUDA `keys` by
    `keys_class`, and the pairs of queries and keys of all heads, down to a power of two; elsewhere one query's bytes
    of keys and values, up to one.
    `opaque` tensors are of a subclass without memory of its own (FakeTensor, DTensor): only operations of torch can
    compute with them. `device_index` says which of several GPUs holds the tensors, which need not be the current one;
    None stands for the current one.
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
    head_windows: bool = False
    head_precision: str = "model"
    stored: str | None = None
    opaque: bool = False
    holes: bool | None = None
    keys: int = 0
    kv_bytes: int = 0
    pairs: int = 0
    packed: int = 0
    aligned: bool = True
    device_index: int | None = None
    head_until: bool = False

    @property
    def per_head(self) -> bool:
        """Whether heads are asked for different things."""
        return self.head_windows or self.head_precision != "model"

    @property
    def light_training(self) -> bool:
        """Whether training over runs is so light that a CUDA device waits for the host.

        The host then launches torch's kernels, with one mask for all layers, sooner than any that know of runs: found
        by whole steps of BERT-base and of a model shaped like Qwen2.5-0.5B on an H100.
        """
        plain = not (self.per_head or self.softcap or self.sink_logits or self.need_lse or self.compiling)
        light = 0 < self.pairs * (self.head_dim + self.head_dim_v) < _LIGHT_PRODUCTS
        ours = self.device == "cuda" and self.dtype != torch.float32 and self.kind == "ragged"
        return self.needs_grad and plain and light and ours

    def words(self) -> str:
        """The facts in words, those that are false left out."""
        dtype = str(self.dtype).removeprefix("torch.")
        values = "" if self.head_dim_v == self.head_dim else f" and {self.head_dim_v} for values"
        heads = "1 query head" if self.groups == 1 else f"{self.groups} query heads"
        sizes = f"head_dim {self.head_dim}{values}"
        facts = [self.kind, dtype, sizes, f"{heads} per key/value head", self.device]
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
            "with a window per head": self.head_windows,
            "up to a position": self.head_until,
            f"with {self.head_precision} products": self.head_precision != "model",
            "compiled": self.compiling,
            "of tensors without memory": self.opaque,
        }
        if self.stored is not None:
            facts.append(f"keys and values stored as {self.stored}")
        return ", ".join([*facts, *(name for name, holds in flags.items() if holds)])

    @classmethod
    def of(cls, request: AttentionRequest, facts: Facts | None = None) -> CallSpec:
        """The spec of a request; `facts` are those of its structure, else found without a look at its padding."""
        q, k, v, structure = request.query, request.key, request.value, request.structure
        bias, sink_logits = request.bias, request.sink_logits
        grad = torch.is_grad_enabled() and (
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or (bias is not None and bias.requires_grad)
            or (sink_logits is not None and sink_logits.requires_grad)
        )
        device, index = ("cpu", None) if q.is_cpu else (q.device.type, q.device.index)
        compiling = facts is None and torch.compiler.is_compiling()
        opaque = not compiling and not (type(q) is type(k) is type(v) is Tensor) and holds_no_memory(q, k, v)
        if facts is None:
            facts = Facts.of(structure, look=False)
        kind, rules = facts.kind, request.per_head
        if rules is not None and kind == "ragged" and rules.has_sinks and not facts.sinks_at_runs:
            kind = "irregular"
        if compiling and device == "cuda" and kind == "ragged" and not structure.one_run_a_row:
            kind = "irregular"  # nobody can look where chunks and documents begin
        _, heads, q_len, head_dim = q.shape
        keys = kv_bytes = pairs = 0
        if type(q_len) is int and not (compiling or opaque):  # in torch.jit.trace extents are tensors
            if device == "cuda":
                keys = facts.keys
                pairs = 1 << (heads * q_len * k.shape[0] * k.shape[2]).bit_length() >> 1
            elif q_len == 1:
                kv_bytes = 1 << ((k.numel() + v.numel()) * k.dtype.itemsize - 1).bit_length()
        per_head = (False, "model") if rules is None else (rules.windowed, rules.precision)
        return cls(
            device, q.dtype, head_dim, head_dim_of(v), heads // k.shape[1], kind,
            facts.windowed, facts.window_sinks, q_len == 1, grad,
            request.dropout > 0, request.softcap is not None, sink_logits is not None, bias is not None,
            request.need_lse, compiling, *per_head, None if request.stored is None else format_of(v), opaque,
            facts.holes, keys, kv_bytes, pairs, facts.packed, facts.aligned, index,
            rules is not None and rules.until is not None,
        )  # fmt: skip
