"""The kind of an attention call: what a backend is chosen by and a kernel is made for, and the key of what is kept."""

from typing import NamedTuple

import torch

from .structure import MaskStructure

# What a call asks for beside attention over its structure. A backend refuses each that it does not name.
GRAD, DROPOUT, SOFTCAP, SINKS, BIAS, LSE = (1 << bit for bit in range(6))
COMPILING, OPAQUE, STORED, HEAD_WINDOWS, HEAD_BF16, HEAD_INT8, HEAD_UNTIL = (1 << bit for bit in range(6, 13))
# What else is known of it.
PER_HEAD, HEAD_SINKS, WINDOW, WINDOW_SINKS, ONE_QUERY, LOOKED, HOLES = (1 << bit for bit in range(13, 20))
BEHIND, CUT_SINKS, EMPTY, SYMBOLIC, SUBCLASS = (1 << bit for bit in range(20, 25))
PAGES = 1 << 25

SINKS_AWAY = HEAD_SINKS | CUT_SINKS
"""Heads have sinks, which the runs that kernels walk need not hold."""

OPTIONS = {
    DROPOUT: "dropout",
    SOFTCAP: "softcap",
    SINKS: "learned sinks",
    BIAS: "additive bias",
    LSE: "log-sum-exp",
    GRAD: "gradient",
    COMPILING: "form for traced graphs",
    OPAQUE: "tensors without memory",
    STORED: "keys and values stored as codes",
    PAGES: "keys and values in pages",
    HEAD_WINDOWS: "windows per head",
    HEAD_BF16: "bf16 products per head",
    HEAD_INT8: "int8 products per head",
    HEAD_UNTIL: "rules up to a position per head",
}
"""What a call may ask for, and how refusals name it."""

_WORDS = {WINDOW: "windowed", WINDOW_SINKS: "with window sinks", ONE_QUERY: "one query", COMPILING: "compiled"}
"""What the words of a kind say otherwise, or beside it."""

_LIGHT_PRODUCTS = 1 << 33
"""Products of numbers, pairs of all heads times their channels, below which training is light."""


class CallKind(NamedTuple):
    """The kind of a call: all that the choice of a backend and its kernel depend on. Hashable, without data.

    Attributes:
        device: Where all its tensors lie.
        dtype, key_dtype, value_dtype: Those of the three tensors; they differ where keys and values are codes.
        heads, kv_heads: Query heads and key/value heads.
        head_dim, head_dim_v: Channels of queries and keys, and of values; of a value in four bits, too.
        shape: That of the structure (`MaskStructure.shape`), or `irregular` if the padding has holes, so that rows are
            not contiguous runs.
        features: The bits of this module. `LOOKED`: the padding was read, and `HOLES` says whether it has any.
            `BEHIND`: queries of a run stand behind its last key. `CUT_SINKS`: runs need not hold a sequence's first
            keys. `EMPTY`: no row, head, query, key or channel. `SYMBOLIC`: extents are tensors, as in
            `torch.jit.trace`. `SUBCLASS`: a tensor is of a subclass with memory of its own.
        packed: Keys of the longest run where every query and key was seen to lie in one, as in a packed row, down to a
            power of two; else 0.
        keys, pairs: On CUDA the number of keys by `keys_class`, and of pairs of queries and keys of all heads, down to
            a power of two; else 0.
        kv_bytes: Elsewhere one query's bytes of keys and values, up to a power of two; else 0.
    """

    device: torch.device
    dtype: torch.dtype
    key_dtype: torch.dtype
    value_dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    shape: str
    features: int
    packed: int = 0
    keys: int = 0
    pairs: int = 0
    kv_bytes: int = 0

    @property
    def groups(self) -> int:
        """Query heads to a key/value head."""
        return self.heads // self.kv_heads

    @property
    def decode(self) -> bool:
        """Whether there is one query per sequence."""
        return bool(self.features & ONE_QUERY)

    @property
    def needs_grad(self) -> bool:
        """Whether a backward pass may follow."""
        return bool(self.features & GRAD)

    @property
    def compiling(self) -> bool:
        """Whether the call is traced by `torch.compile` or `torch.export`."""
        return bool(self.features & COMPILING)

    @property
    def per_head(self) -> bool:
        """Whether heads are asked for different things."""
        return bool(self.features & PER_HEAD)

    @property
    def holes(self) -> bool | None:
        """Whether the padding has holes, None if it was not read."""
        return bool(self.features & HOLES) if self.features & LOOKED else None

    @property
    def stored(self) -> str | None:
        """The format that a cache keeps keys and values in, None where they are plain numbers."""
        return format_of(self.value_dtype) if self.features & STORED else None

    @property
    def light_training(self) -> bool:
        """Whether training over runs is so light that a CUDA device waits for the host.

        The host then launches torch's kernels, with one mask for all layers, sooner than any that know of runs: found
        by whole steps of BERT-base and of a model shaped like Qwen2.5-0.5B on an H100.
        """
        plain = not self.features & (PER_HEAD | SOFTCAP | SINKS | LSE | COMPILING)
        light = 0 < self.pairs * (self.head_dim + self.head_dim_v) < _LIGHT_PRODUCTS
        ours = self.device.type == "cuda" and self.dtype != torch.float32 and self.shape == "ragged"
        return self.needs_grad and plain and light and ours

    def words(self) -> str:
        """The kind in words, what it does not ask for left out."""
        dtype = str(self.dtype).removeprefix("torch.")
        values = "" if self.head_dim_v == self.head_dim else f" and {self.head_dim_v} for values"
        heads = "1 query head" if self.groups == 1 else f"{self.groups} query heads"
        sizes = f"head_dim {self.head_dim}{values}"
        options = [word for bit, word in _WORDS.items() if self.features & bit]
        asked = self.features & ~(STORED | COMPILING)
        options += [f"with {name}" for bit, name in OPTIONS.items() if asked & bit]
        facts = [self.shape, dtype, sizes, f"{heads} per key/value head", self.device.type, *options]
        return ", ".join(facts if self.stored is None else [*facts, f"keys and values stored as {self.stored}"])


Facts = tuple[str, int, int, int]
"""What a structure says of the kind of its calls: `shape`, its part of `features`, `packed` and `keys`."""

SMALL_PAIRS = 1 << 14
"""Pairs of queries and keys up to which a padded batch is one masked call, and nobody looks whether it has holes."""

_SMALL_PAIRS_CUDA = 1 << 17
"""The same on CUDA, which masks more of them in the time in which the host waits to look."""


BITS = {"int8": 8, "k8v4": 4}
"""Bits of a value's code, by the name of the format of a cache; keys have eight."""


def format_of(value_dtype: torch.dtype) -> str:
    """The name of the format whose codes of values have a dtype."""
    return "k8v4" if value_dtype is torch.uint8 else "int8"


def keys_class(keys: int) -> int:
    """A number of keys, rounded down to what choices depend on: a power of two, or 384."""
    return 384 if 384 <= keys < 512 else 1 << keys.bit_length() >> 1


def facts_of(structure: MaskStructure, device: str, named: bool) -> Facts:
    """The facts of a structure on a type of device, for `MaskStructure.cached`.

    Padding is looked at, for which the host may have to wait for a device, where that is worth it, and where a backend
    is `named` always.
    """
    shape, features, packed = structure.shape, PAGES if structure.paged else 0, 0
    batch, q_len, keys = structure.batch, structure.q_len, structure.kv_len
    numbers = type(q_len) is type(keys) is int  # in torch.jit.trace extents are tensors
    looks = shape == "ragged" and not features and device != "meta" and numbers
    if looks and not named:
        looks = batch * q_len * keys > (_SMALL_PAIRS_CUDA if device == "cuda" else SMALL_PAIRS)
        if device == "cuda" and q_len == 1:
            # a step reads its padding and offset where they are: looking at them would halt it
            looks = not structure.one_run_a_row
        looks = looks or device not in ("cpu", "cuda")
    if looks:
        features |= LOOKED
        runs = structure.segments()
        if runs is None:
            shape = "irregular"  # kernels that walk runs are no better off than with a dense mask
            features |= HOLES
        else:
            ends = all(run.offset + run.q_len == run.k_len for run in runs)
            if not ends and (structure.causal or structure.window is not None):
                features |= BEHIND
            if (sum(run.q_len for run in runs), sum(run.k_len for run in runs)) == (batch * q_len, batch * keys):
                packed = 1 << max((int(run.k_len) for run in runs), default=0).bit_length() >> 1
    features |= WINDOW if structure.window is not None and structure.windowed else 0
    features |= WINDOW_SINKS if structure.sinks > 0 else 0
    features |= ONE_QUERY if q_len == 1 else 0
    features |= 0 if structure.sinks_at_runs else CUT_SINKS
    return shape, features, packed, keys_class(keys) if numbers and device == "cuda" else 0


def facts_in_graph(structure: MaskStructure, device: str) -> Facts:
    """The same in a traced graph, for which nothing is read; nor is it guarded by the class of its lengths."""
    shape, features, packed, keys = facts_of(structure, "meta", False)
    if device == "cuda" and shape == "ragged" and not structure.one_run_a_row:
        shape = "irregular"  # nobody can look where chunks and documents begin
    return shape, features, packed, keys
