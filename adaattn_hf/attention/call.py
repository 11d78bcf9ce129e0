"""One attention call: tensors, structure and the few numbers that change the mathematics."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from . import kind as asks
from .kind import CallKind
from .structure import OPERANDS as RULES
from .structure import MaskStructure
from .tracing import any_autocast, holds_no_memory

if TYPE_CHECKING:
    from .heads import HeadRules
    from .stored import StoredKV

OPERANDS = (
    "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? sink_logits, float scaling, float? softcap, "
    f"Tensor? key_scale, Tensor? value_scale, Tensor? key_mean, Tensor? first_key, {RULES}"
)
"""What `AttentionCall.operands` returns, in the schema of an operator."""

NAMESPACE = __name__.partition(".")[0]
"""Of our operators: the package that holds this file, of which copies may be loaded beside one another."""

_new = tuple.__new__


# Not frozen, and nothing is checked as it is made: one is made in every layer.
@dataclass(eq=False, slots=True)
class AttentionCall:
    """What a backend is asked to compute. Nobody but `check` changes one.

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
        new_tokens: Key and value `[batch, num_kv_heads, 1, head_dim]` of the queries, which a kernel writes into
            their pages before it reads them, where the structure has pages.
        window: The layer's own, told to plans: one row of a dense mask does not tell it from padding.
        layer: Number of the layer that asks, told to listeners.
        backend: Backend that was asked for by name, told to listeners.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    structure: MaskStructure
    scaling: float
    dropout: float = 0.0
    softcap: float | None = None
    sink_logits: Tensor | None = None
    bias: Tensor | None = None
    need_lse: bool = False
    per_head: "HeadRules | None" = None
    stored: "StoredKV | None" = None
    new_tokens: tuple[Tensor, Tensor] | None = None
    window: int | None = None
    layer: int | None = None
    backend: str | None = None

    def check(self) -> None:
        """Brings the tensors into one batch, and refuses what does not belong together (ValueError).

        `select.attend` does so once for each kind of call, and whenever `kind` finds that tensors do not fit.
        """
        check_tensors(self.query, self.key, self.value)
        if not self.query.shape[0] == self.key.shape[0] == self.value.shape[0]:
            self.query, self.key, self.value = in_one_batch(self.query, self.key, self.value)
        check_dtype("query", self.query)
        if not self.query.device == self.key.device == self.value.device:
            raise ValueError(
                f"query, key, value: got tensors on {self.query.device}, {self.key.device} and {self.value.device}, "
                "expected one device; move them to the query's, key.to(query.device)"
            )
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
            windows, mean = self.per_head.windows, self.per_head.key_mean
            if len(windows) != kv_heads:
                raise ValueError(
                    f"per_head: got rules for {len(windows)} heads, expected one for each of the {kv_heads} key/value "
                    "heads"
                )
            if mean is not None and mean.shape[1] != dim:
                raise ValueError(f"per_head.key_mean: got shape {tuple(mean.shape)}, expected [{len(windows)}, {dim}]")
        if self.dropout and not 0.0 <= self.dropout <= 1.0:
            raise ValueError(f"dropout: got {self.dropout}, expected a probability from 0 to 1; 0 drops nothing")
        softcap = self.softcap
        if softcap is not None and not (isinstance(softcap, (float, int)) and 0.0 < softcap < float("inf")):
            raise ValueError(f"softcap: got {softcap}, expected a positive number, or None for no bound on the scores")
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

    @property
    def is_empty(self) -> bool:
        """Whether there is no row, no query, no key or no channel: kernels divide by each of them."""
        return not (self.query.numel() and self.key.numel() and self.value.numel())

    def kind(self, named: bool = False, compiling: bool | None = None) -> CallKind | None:
        """The kind of the call; None where its tensors do not fit one another and the structure as kernels take them.

        `check` then puts that right, or refuses it. Padding is looked at where that is worth it, and where a backend
        is `named` always. Every call comes here, so that each attribute is read once, and torch is not asked whether a
        graph is traced where `compiling` says so.
        """
        query, key, value, structure = self.query, self.key, self.value, self.structure
        if compiling is None:
            compiling = torch.compiler.is_compiling()
        device = query.device
        try:
            batch, heads, q_len, dim = query.shape
            k_batch, kv_heads, kv_len, k_dim = key.shape
            v_batch, v_heads, v_len, dim_v = value.shape
        except ValueError:
            return None  # another number of dimensions
        if not (
            batch == k_batch == v_batch == structure.batch
            and q_len == structure.q_len
            and kv_len == v_len == structure.kv_len
            and kv_heads == v_heads
            and dim == k_dim != 0
            and query.layout is key.layout is value.layout is torch.strided
            and device == key.device == value.device
            and (structure.mask is None or compiling or structure.mask_covers(heads))
        ):
            return None
        if compiling:
            shape, features, packed, keys = asks.facts_in_graph(structure, device.type)
        else:
            facts_key = asks.facts_of, device.type, named
            shape, features, packed, keys = structure.made.get(facts_key) or structure.cached(*facts_key)
        rules, bias, sinks = self.per_head, self.bias, self.sink_logits
        if rules is not None:
            features |= rules.features
            if features & asks.SINKS_AWAY == asks.SINKS_AWAY and shape == "ragged":
                shape = "irregular"
        if self.stored is not None:
            features |= asks.STORED
            if value.dtype is torch.uint8:
                dim_v *= 2
        if torch.is_grad_enabled() and (
            query.requires_grad
            or key.requires_grad
            or value.requires_grad
            or (bias is not None and bias.requires_grad)
            or (sinks is not None and sinks.requires_grad)
        ):
            features |= asks.GRAD
        if self.dropout:
            features |= asks.DROPOUT
        if self.softcap is not None:
            features |= asks.SOFTCAP
        if sinks is not None:
            features |= asks.SINKS
        if bias is not None:
            features |= asks.BIAS
        if self.need_lse:
            features |= asks.LSE
        pairs = kv_bytes = 0
        if compiling:
            features |= asks.COMPILING
        elif type(q_len) is not int:
            features |= asks.SYMBOLIC
        else:
            if not (batch and heads and q_len and kv_len and dim_v):
                features |= asks.EMPTY
            if not (type(query) is type(key) is type(value) is Tensor):
                features |= asks.OPAQUE if holds_no_memory(query, key, value) else asks.SUBCLASS
            if not features & asks.OPAQUE and query.is_cuda:
                pairs = 1 << (batch * heads * q_len * kv_len).bit_length() >> 1
            elif not features & asks.OPAQUE and q_len == 1:
                kv_bytes = 1 << ((key.numel() + value.numel()) * key.dtype.itemsize - 1).bit_length()
        fields = (
            device, query.dtype, key.dtype, value.dtype, heads, kv_heads, dim, dim_v,
            shape, features, packed, keys, pairs, kv_bytes,
        )  # fmt: skip
        # made as `CallKind(*fields)` is, but for a call of Python that each layer would pay for
        return CallKind(*fields) if compiling else _new(CallKind, fields)

    def checked_kind(self, named: bool = False) -> CallKind:
        """The kind of the call, after `check`."""
        self.check()
        kind = self.kind(named)
        assert kind is not None, "what was checked fits"
        return kind

    def operands(self) -> tuple[Any, ...]:
        """What operators of traced graphs compute from, as in `OPERANDS`."""
        record = (None,) * 4 if self.stored is None else self.stored.tensors().values()
        tensors = self.query, self.key, self.value, self.bias, self.sink_logits
        return *tensors, self.scaling, self.softcap, *record, *self.structure.operands()

    @classmethod
    def of_operands(cls, *operands: Any) -> Self:
        """The call of what `operands` returned."""
        from .stored import StoredKV  # of graphs alone

        query, key, value, bias, sinks, scaling, softcap, *rest = operands
        record, structure = rest[:4], MaskStructure.of_operands(query, key, *rest[4:])
        stored = None if record[0] is None else StoredKV(*record)
        return cls(query, key, value, structure, scaling, 0.0, softcap, sinks, bias, stored=stored)

    def with_positive_scaling(self) -> Self:
        """The same call by a factor above 0, for kernels that divide by it, or compare scores before they multiply."""
        if self.scaling > 0:
            return self
        return replace(self, query=self.query * (-1.0 if self.scaling else 0.0), scaling=-self.scaling or 1.0)

    def dequantised(self) -> Self:
        """The same call with keys and values as numbers: itself, unless they are codes of a cache."""
        if self.stored is None:
            return self
        self.stored.check_device(self.query.device)
        dtype = self.query.dtype
        key, value = self.stored.keys(self.key, dtype), self.stored.values(self.value, dtype)
        return replace(self, key=key, value=value, stored=None)


def head_dim_of(value: Tensor) -> int:
    """Channels of a value, also of one in four bits."""
    return value.shape[3] * (2 if value.dtype is torch.uint8 else 1)


def empty_output(query: Tensor, _: Tensor, value: Tensor, *rest: Any) -> Tensor:
    """An output `[batch, q_len, heads, head_dim_v]` that nobody has computed, as a traced graph knows it."""
    batch, heads, q_len, _dim = query.shape
    return query.new_empty((batch, q_len, heads, head_dim_of(value)))


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


def one_dtype(query: Tensor, key: Tensor, value: Tensor, upcasts: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value in one dtype: autocast's where it is on, else the widest; `upcasts` asks for at least fp32.

    Under autocast, rotary embeddings return fp32 queries and keys beside half-precision values. It leaves fp64 alone.
    Tensors that are not dense `[batch, heads, length, head_dim]` are a ValueError.
    """
    check_tensors(query, key, value)
    dtype = query.dtype
    casts = any_autocast() and _autocasts(query.device.type)
    casts = casts and torch.float64 not in (dtype, key.dtype, value.dtype)
    if not (casts or upcasts) and dtype is key.dtype is value.dtype:
        return query, key, value
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_dtype(name, tensor)
    if casts:
        dtype = torch.get_autocast_dtype(query.device.type)
    else:
        dtype = torch.promote_types(torch.promote_types(dtype, key.dtype), value.dtype)
    if upcasts:
        dtype = torch.promote_types(dtype, torch.float32)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def restored(out: Tensor, dtype: torch.dtype) -> Tensor:
    """The output contiguous, in the query's dtype; under autocast in autocast's, as stock attention does."""
    if out.dtype is not dtype and not _autocasts(out.device.type):
        out = out.to(dtype)
    return out.contiguous()


def _autocasts(device: str) -> bool:
    return device != "meta" and torch.is_autocast_enabled(device)  # `explain` runs models on meta, which has none


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
