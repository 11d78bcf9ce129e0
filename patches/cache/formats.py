"""What a cache keeps of a token, and what attention is told of it: numbers, or codes of 8 or 4 bits with scales."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adaattn_hf.attention.call import NAMESPACE, head_dim_of
from adaattn_hf.attention.kind import BITS
from adaattn_hf.attention.stored import CHANNELS, FULL, StoredKV, direction_of, mean_of, quantise
from adaattn_hf.backends.native import storing as native
from adaattn_hf.backends.order import TRITON

from .store import Room, Store, empty

SMOOTHED = 16
"""Tokens after which the mean of a sequence's keys is computed and subtracted before quantisation."""
Read = tuple[Tensor, Tensor, "StoredKV | None"]
"""Keys, values and what turns them into numbers, as attention reads them."""


class Format:
    """Keys and values as numbers in the model's dtype; other formats change what differs.

    Attributes:
        parts: The tensors of a store that grow with the tokens: dtype, None for the model's, and the extent of a token,
            if any: `k` channels of a key, `v` of a value, `w` half of these.
        per_sequence: Tensors of a sequence as a whole, fp32 `[batch, num_kv_heads, head_dim]`.
        is_numbers: What is kept are the numbers that came.
    """

    parts: Mapping[str, tuple[torch.dtype | None, str]] = {"keys": (None, "k"), "values": (None, "v")}
    per_sequence: tuple[str, ...] = ()
    is_numbers = True

    def store(self, keys: Tensor, values: Tensor, room: Room, tokens: int = 0) -> Store:
        """An empty store for tokens shaped like these `[batch, num_kv_heads, any, head_dim]`, with room for so many."""
        sizes, dtypes = widths(keys.shape[3], values.shape[3]), {"k": keys.dtype, "v": values.dtype}
        extents = (*keys.shape[:2], room.size(tokens))
        rooms = {
            name: empty((*extents, *(sizes[letter] for letter in extent)), dtype or dtypes[extent], keys.device)
            for name, (dtype, extent) in self.parts.items()
        }
        return Store(rooms, room)

    def token_bytes(self, head_dim: int, head_dim_v: int, model: torch.dtype) -> int:
        """Bytes of a token of one key/value head, of a model in that dtype."""
        sizes = widths(head_dim, head_dim_v)
        return sum((dtype or model).itemsize * sizes.get(extent, 1) for dtype, extent in self.parts.values())

    def restored(self, held: Mapping[str, Tensor], room: Room) -> Store:
        """A store that holds what `Store.held` gave."""
        store = Store({name: held[name][:, :, :0] for name in self.parts}, room)
        store.take(held)
        return store

    def append(self, store: Store, keys: Tensor, values: Tensor) -> None:
        """Put `[batch, num_kv_heads, n, head_dim]` behind what a store holds."""
        if self.is_numbers and torch.is_grad_enabled():  # autograd may have saved what was shown
            store.concatenate(keys, values)
            return
        past, count = len(store), keys.shape[2]
        self.begin(store, keys, values)
        parts = store.extend(count)
        if count:
            self.write(store, keys, values, parts, past)

    def begin(self, store: Store, keys: Tensor, values: Tensor) -> None:
        """Prepare a store for tokens that `write` brings next."""
        store.widen(keys, values)

    def write(self, store: Store, keys: Tensor, values: Tensor, parts: Sequence[Tensor], at: int = 0) -> None:
        """Write tokens into parts `[batch, num_kv_heads, length, …]` from place `at` on."""
        for part, new in zip(parts, (keys, values), strict=True):
            part.narrow(2, at, new.shape[2]).copy_(new)

    def read(self, store: Store, parts: Sequence[Tensor], first: bool = True) -> Read:
        """Parts of a store as attention reads them; `first`: the sequence's first key is the first of them."""
        return parts[0], parts[1], None

    def expect(self, store: Store, queries: Tensor) -> None:
        """From now on keep keys such that scores with queries like a prompt's change least."""

    def renew_first(self, store: Store, rows: Sequence[int], parts: Sequence[Tensor]) -> None:
        """Let parts `[rows, num_kv_heads, …]` be the first tokens of sequences `rows`; without parts there are none."""


class Codes(Format):
    """Keys in 8 bits, values in 8 or 4, as `attention.stored` defines them; read as they are stored.

    Beside a sequence's tokens there are the `mean` of its rotated keys, its `first` key, unrounded, and the direction
    `along` which the errors of its keys cancel.
    """

    per_sequence = ("mean", "first", "along")
    is_numbers = False

    def __init__(self, bits: int) -> None:
        """`bits` of a value's code."""
        self.parts = {
            "key_codes": (torch.int8, "k"),
            "key_scale": (torch.uint8, ""),
            "value_codes": (torch.int8, "v") if bits == 8 else (torch.uint8, "w"),
            "value_scale": (torch.uint8, ""),
        }

    def append(self, store: Store, keys: Tensor, values: Tensor) -> None:
        """Round tokens behind what is there; in a graph the device counts them."""
        if store.count is not None and torch.compiler.is_compiling():
            mean, along = store.per_sequence.get("mean"), store.per_sequence.get("along")
            ring = store.room.ring or (None, None)
            store_tokens(keys, values, *store.rooms.values(), mean, along, store.count, *ring)
            store.counted_on_the_device()
        else:
            super().append(store, keys, values)

    def begin(self, store: Store, keys: Tensor, values: Tensor) -> None:
        """Note the first key and the mean of a sequence; codes from before the mean was known are made anew."""
        length, count = len(store), keys.shape[2]
        if count and not length:
            # copied, since a view would keep the whole prompt
            first = keys[:, :, 0].to(torch.float32, copy=True, memory_format=torch.contiguous_format)
            store.per_sequence["first"] = first
            store.per_sequence.pop("mean", None)
            # where nothing may move later, few keys tell the mean as well as they can: any vector may be taken off
            if store.room.fixed or count >= SMOOTHED:
                store.per_sequence["mean"] = mean_of(keys)
        elif count and "mean" not in store.per_sequence and length + count >= SMOOTHED:
            codes, _, record = self.read(store, parts := store.views())
            past = record.keys(codes, torch.float32)
            store.per_sequence["mean"] = mean_of(torch.cat([past, keys.float()], dim=2))
            self.write(store, past, None, parts)

    def write(self, store: Store, keys: Tensor, values: Tensor | None, parts: Sequence[Tensor], at: int = 0) -> None:
        """Round tokens into parts; without values those stay."""
        write(keys, values, parts, mean=store.per_sequence.get("mean"), along=store.per_sequence.get("along"), at=at)

    def read(self, store: Store, parts: Sequence[Tensor], first: bool = True) -> tuple[Tensor, Tensor, StoredKV]:
        """Codes, and what they stand for."""
        vectors = store.per_sequence
        record = StoredKV(parts[1], parts[3], vectors.get("mean"), vectors.get("first") if first else None)
        return parts[0], parts[2], record

    def expect(self, store: Store, queries: Tensor) -> None:
        """From now on round keys such that their errors cancel along the mean of a prompt's queries."""
        store.per_sequence.pop("along", None)
        if queries.shape[2] >= SMOOTHED:
            heads = store.rooms["key_codes"].shape[1]
            store.per_sequence["along"] = direction_of(queries, heads).to(store.device)

    def reread(self, store: Store, queries: Tensor, keys: Tensor) -> None:
        """Round the keys of a prompt, the only tokens held, again, now that its queries are known."""
        self.expect(store, queries)
        if "along" in store.per_sequence:
            # a cache that offloads has moved its own by now
            self.write(store, keys[:, :, -len(store) :].to(store.device), None, store.views())

    def renew_first(self, store: Store, rows: Sequence[int], parts: Sequence[Tensor]) -> None:
        """Keys that move to the first place become the unrounded one, as well as their codes tell them."""
        if not parts:
            store.per_sequence.pop("first", None)
        elif "first" in store.per_sequence and rows:
            mean, first = store.per_sequence.get("mean"), store.per_sequence["first"]
            record = StoredKV(parts[1][..., None], parts[3][..., None], None if mean is None else mean[list(rows)])
            store.per_sequence["first"] = first.index_put(
                (torch.tensor(rows, dtype=torch.int64, device=first.device),),
                record.keys(parts[0][:, :, None], torch.float32)[:, :, 0],
            )


FORMATS: dict[str, Format] = {"model": Format(), **{name: Codes(bits) for name, bits in BITS.items()}}
"""What a cache can keep: numbers in the model's dtype, or one of the quantised formats."""


def widths(head_dim: int, head_dim_v: int) -> dict[str, int]:
    """The extents that `Format.parts` names, of keys and values of so many channels."""
    return {"k": head_dim, "v": head_dim_v, "w": head_dim_v // 2}


def check_channels(stored: str, head_dim: int) -> None:
    """Refuse values of too few channels for a format (ValueError)."""
    if stored == "k8v4" and head_dim % CHANNELS:
        raise ValueError(
            f"cache: 'k8v4' keeps values in groups of {CHANNELS} channels, this model's values have {head_dim}; "
            "use cache='int8'"
        )


# ---------------- what attention is handed
_REMEDY = (
    'a quantised cache holds codes, not numbers. Load the model with attn_implementation="adaattn"; for a model that '
    'computes with its cached keys itself use a cache of numbers (cache="model", GrowingCache or DynamicCache)'
)


@dataclass(eq=False, repr=False)
class StoredTensor:
    """Stands for keys or values `[batch, num_kv_heads, length, head_dim]` that are no plain tensor of all tokens.

    Supported models read only a shape, a dtype or a device before attention does. One that computes with the keys gets
    an error that says what to do: nothing is dequantised silently.

    Attributes:
        codes: What attention reads: codes, the numbers of a prompt as they came, or, where `streams` holds the tokens
            by groups of heads, a tensor of all tokens' shape without memory.
        record: What turns codes into numbers; None where there are none.
        dtype: Of the model.
        prompt: The layer that has rounded this prompt and rounds its keys again when attention tells it the queries.
        streams: The layer that computes attention over its heads' own tokens.
    """

    codes: Tensor
    record: StoredKV | None
    dtype: torch.dtype
    prompt: Any = None
    streams: Any = None
    ndim = 4

    @property
    def device(self) -> torch.device:
        """Where the codes lie."""
        return self.codes.device

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor that this one stands for."""
        return torch.Size((*self.codes.shape[:3], head_dim_of(self.codes)))

    def to(self, device: torch.device) -> Any:
        """Itself: layers that share keys ask for them at their queries' device before Transformers 5.23."""
        return self if device == self.device else self.__getattr__("to")

    def size(self, dim: int | None = None) -> Any:
        """Like `Tensor.size`."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Four."""
        return 4

    def numel(self) -> int:
        """Elements of the tensor that this one stands for."""
        return self.shape.numel()

    def __getattr__(self, name: str) -> Any:
        """Refused: any other use of keys needs dequantised numbers."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        raise TypeError(f"cache: .{name} was asked of stored keys or values; {_REMEDY}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError(f"cache: {getattr(func, '__name__', func)} was called with stored keys or values; {_REMEDY}")

    def _calculated(self, *_: Any) -> Any:
        raise TypeError(f"cache: a slice, a length or an operator was asked of stored keys or values; {_REMEDY}")

    # Python looks for these on the class, and without them would compare two stand-ins instead of their numbers
    __getitem__ = __setitem__ = __len__ = __bool__ = __eq__ = __ne__ = __lt__ = __gt__ = __le__ = __ge__ = _calculated
    __add__ = __sub__ = __mul__ = __truediv__ = __matmul__ = __neg__ = __pow__ = __floordiv__ = __mod__ = _calculated
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rmatmul__ = __rpow__ = __abs__ = __array__ = _calculated
    __hash__ = object.__hash__


# ---------------- rounding, by one call of a kernel where one serves the tokens, else by torch
def write(
    keys: Tensor,
    values: Tensor | None,
    parts: Sequence[Tensor],
    *,
    mean: Tensor | None = None,
    along: Tensor | None = None,
    at: int | Tensor = 0,
    ring: tuple[int, int] | None = None,
) -> None:
    """Write the codes and scales of turned tokens where they belong, as `attention.stored.quantise` defines them.

    The arguments are those of `backends.triton.storing.store`. A single token that no kernel serves does without
    `along`, which would take many small steps.
    """
    if keys.is_cuda and not TRITON.missing():
        from adaattn_hf.backends.triton import storing as triton  # imports Triton

        if triton.serves(keys, parts[0]) and (values is None or triton.serves(values, parts[2])):
            triton.store(keys, values, parts, mean=mean, along=along, at=at, ring=ring)
            return
    count, slots, counter = keys.shape[2], parts[0].shape[2], at
    if isinstance(at, Tensor):
        torch._assert_async(at + count <= (ring[1] if ring else slots), FULL)
        if ring:
            at = torch.where(at < slots, at, ring[0] + (at - ring[0]) % (slots - ring[0]))
    tokens: list[tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]]
    tokens = [(keys, parts[0], parts[1], mean, along)]
    if values is not None:
        tokens.append((values, parts[2], parts[3], None, None))
    for x, codes, scale, offset, direction in tokens:
        if native.serves(x):
            native.store(x, codes, scale, mean=offset, along=direction, at=int(at))
            continue
        bits = 4 if codes.dtype is torch.uint8 else 8
        new_codes, new_scale = quantise(x, bits=bits, mean=offset, along=direction if x.is_cpu or count > 1 else None)
        places = torch.arange(count, device=x.device) + at
        codes.index_copy_(2, places, new_codes)
        scale.index_copy_(2, places, new_scale)
    if isinstance(counter, Tensor):
        counter.add_(count)


@torch.library.custom_op(
    f"{NAMESPACE}::store_tokens",
    mutates_args=("key_codes", "key_scale", "value_codes", "value_scale", "held"),
    schema="(Tensor keys, Tensor values, Tensor(a!) key_codes, Tensor(b!) key_scale, Tensor(c!) value_codes, "
    "Tensor(d!) value_scale, Tensor? mean, Tensor? along, Tensor(e!) held, int? sinks, int? most) -> ()",
)
def store_tokens(keys: Tensor, values: Tensor, *inputs: Any) -> None:
    """`write` as an operator of torch, for graphs that are traced and may be captured: `held` counts on its device."""
    *parts, mean, along, held, sinks, most = inputs
    write(keys, values, parts, mean=mean, along=along, at=held, ring=None if most is None else (sinks, most))


@store_tokens.register_fake
def _store_tokens_fake(*_: Any) -> None:
    """Writes nothing, and has no output."""
