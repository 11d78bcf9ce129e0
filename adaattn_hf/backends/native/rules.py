"""What a call of the library asks for beyond its tensors, how a structure becomes that, and the checks before it.

The kernels read raw memory, so nothing may reach them unchecked. That queries, keys and values belong together an
`AttentionCall` has seen to. A call finds out cheaply whether its tensors are `in_memory`; only where one is not does it
come to `readable`, to be put right or refused in words.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

import torch
from torch import Tensor

from ...attention.stored import StoredKV
from ...attention.structure import MaskStructure
from ...attention.tracing import holds_no_memory
from .library import DTYPES, HEADS, SCORES, STORED, VISIBLE

Form = Literal["contiguous", "rows", "strided", "broadcast"]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
OFFSETS = 1 << 40
"""An address up to which it may be but the offset of a view into a storage that was freed: that one begins at 0."""

_EIGHT_BITS = 5  # the number of `StoredKV`'s scales among the dtypes of the C interface
_ROTATED = 3  # by `hadamard` are keys (1) and values (2) of a cache
COMPUTE = {"model": 0, "bf16": 1, "int8": 2}
NONE4 = (0, 0, 0, 0)
_NONE3 = (0, 0, 0)
_SCORES_ALONE = bytes(SCORES.size)

NOTHING_ELSE = bytes(SCORES.size + STORED.size)
"""What it is told of scores that nothing changes, of keys and values that are numbers."""
_FAR = 1 << 40  # further than any key: a window or sinks beyond it hide and exempt the same keys


# Not frozen: a frozen dataclass costs microseconds to make, and one is made for every padded batch. A rule in a tensor
# covers extents (batch, heads, key/value heads g, queries, keys, size d, any number n), in a dtype and a form.
@dataclass(eq=False, slots=True)
class Rules:
    """What a call asks for beyond its tensors; see `src/adaattn.h`. Nobody changes one.

    Attributes:
        causal, window, sinks, offset: As in `MaskStructure`; a window below 0 is none.
        segments: Rows of (row, q_start, q_len, k_start, k_len, offset), or None for one segment per row.
        head_windows, head_sinks: Narrower windows, below 0 for none, and their sinks, which count where there is no
            `window`.
        softcap: 0 for none.
        key_scale, value_scale: Of int8 keys and values (or values of four bits), in the eight bits of `StoredKV`.
        compute: Precision of the products, a key of `COMPUTE`; int8 needs the level avx512_bf16 or amx.
        key_mean: Of the batch, or of each row; subtracted from keys before they are rounded to int8, here or by whoever
            stored them.
        first_key: Stands for the first of the stored keys.
        visible: What queries see, packed once by `find_rules`, as the layers of a pass share it; else empty.
    """

    causal: bool = False
    window: int = -1
    sinks: int = 0
    offset: int = 0
    segments: Tensor | None = field(default=None, metadata={"covers": ("n6", torch.int64, "contiguous")})
    head_windows: Tensor | None = field(default=None, metadata={"covers": ("g", torch.int64, "contiguous")})
    head_sinks: Tensor | None = field(default=None, metadata={"covers": ("g", torch.int64, "contiguous")})
    softcap: float = 0.0
    sink_logits: Tensor | None = field(default=None, metadata={"covers": ("h", torch.float32, "contiguous")})
    bias: Tensor | None = field(default=None, metadata={"covers": ("bhqk", None, "broadcast")})
    mask: Tensor | None = field(default=None, metadata={"covers": ("bhqk", torch.bool, "broadcast")})
    key_scale: Tensor | None = field(default=None, metadata={"covers": ("bgk", torch.uint8, "strided")})
    value_scale: Tensor | None = field(default=None, metadata={"covers": ("bgk", torch.uint8, "strided")})
    compute: str = "model"
    key_mean: Tensor | None = field(default=None, metadata={"covers": ("bgd", torch.float32, "contiguous")})
    first_key: Tensor | None = field(default=None, metadata={"covers": ("bgd", torch.float32, "contiguous")})
    visible: bytes = b""

    def packed(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[list[Tensor], bytes]:
        """The three tensors with their numbers in memory, and the rules' part of the argument structure.

        What is not `readable`, and rules that do not fit queries and keys, are a ValueError.
        """
        tensors = [readable("query", query), readable("key", key), readable("value", value)]
        (batch, heads, q_len, dim), (_, kv_heads, kv_len, _) = query.shape, key.shape
        sizes = {"b": batch, "h": heads, "q": q_len, "d": dim, "g": kv_heads, "k": kv_len, "n": -1, "6": 6}
        for name, (letters, dtype, form) in _COVERS:
            tensor: Tensor | None = getattr(self, name)
            if tensor is None or (self.visible and name == "segments"):
                continue  # the table of `find_rules` was made as the library reads them
            extents = [sizes[letter] for letter in letters]
            if name == "key_mean" and tensor.shape[:1] == (1,):
                extents[0] = 1
            check_rule(name, tensor, extents, dtype, form)
        bias, scale, mean, first = self.bias, self.key_scale, self.key_mean, self.first_key
        scores = SCORES.pack(
            self.softcap, pointer(self.sink_logits), pointer(bias),
            *((0, *NONE4) if bias is None else (DTYPES[bias.dtype], *_broadcast(bias))),
        )  # fmt: skip
        stored = STORED.pack(
            pointer(scale), pointer(self.value_scale), 0 if scale is None else _EIGHT_BITS,
            *(_NONE3 if scale is None else scale.stride()),
            *(_NONE3 if self.value_scale is None else self.value_scale.stride()),
            pointer(first), 0 if scale is None else _ROTATED, pointer(mean), 0 if mean is None else _broadcast(mean)[0],
        )  # fmt: skip
        return tensors, (self.visible or self.visible_packed()) + self.heads_packed() + scores + stored

    def visible_packed(self) -> bytes:
        """What queries see, packed."""
        table, mask = self.segments, self.mask
        return VISIBLE.pack(
            pointer(table), 0 if table is None else table.shape[0], self.offset,
            self.causal, self.window, self.sinks,
            pointer(mask), *(NONE4 if mask is None else _broadcast(mask)),
        )  # fmt: skip

    def heads_packed(self) -> bytes:
        """What heads do apart from one another, packed."""
        return HEADS.pack(COMPUTE[self.compute], pointer(self.head_windows), pointer(self.head_sinks))


def pointer(t: Tensor | None) -> int:
    """The address of a tensor's numbers, 0 for none."""
    return 0 if t is None else t.data_ptr()


def _broadcast(t: Tensor) -> tuple[int, ...]:
    """Strides of `t`, 0 along the extents that it repeats."""
    return tuple(0 if size == 1 else step for size, step in zip(t.shape, t.stride(), strict=True))


NO_RULES = Rules()
_COVERS = tuple((one.name, one.metadata["covers"]) for one in fields(Rules) if one.metadata)


def find_rules(structure: MaskStructure) -> Rules:
    """The rules of a structure; `structure.cached(find_rules)` makes them once for the layers of a pass."""
    window = -1 if structure.window is None else min(structure.window, _FAR)
    rules = Rules(structure.causal, window, min(structure.sinks, _FAR))
    if structure.one_run_a_row and structure.key_padding is None:
        rules.offset = structure.offset()
    elif runs := structure.segments():
        rules.segments = torch.tensor(runs, dtype=torch.int64, device="cpu").reshape(-1, 6)
    else:  # no runs could be told, or no query sees any key: an empty table would say that there are no borders
        rules = Rules(mask=structure.visible())
    rules.visible = rules.visible_packed()
    return rules


def codes_packed(stored: StoredKV, key: Tensor) -> bytes | None:
    """What turns a cache's codes into numbers, packed behind nothing else; None asks for a closer look at it.

    Its keys' codes are `key`, `[batch, num_kv_heads, kv_len, head_dim]`.
    """
    batch, kv_heads, kv_len, dim = key.shape
    vectors, scales = (batch, kv_heads, dim), (batch, kv_heads, kv_len)
    keys, values = stored.key_scale, stored.value_scale
    fits = keys.shape == scales == values.shape and keys.dtype is torch.uint8 is values.dtype
    mean, first = _place(stored.key_mean, vectors), _place(stored.first_key, vectors)
    if not fits or mean < 0 or first < 0 or not (in_memory(keys) and in_memory(values)):
        return None
    step = 0 if batch == 1 or not mean else kv_heads * dim
    return _SCORES_ALONE + STORED.pack(
        keys.data_ptr(), values.data_ptr(), _EIGHT_BITS, *keys.stride(), *values.stride(),
        first, _ROTATED, mean, step,
    )  # fmt: skip


def _place(vector: Tensor | None, extents: tuple[int, ...]) -> int:
    if vector is None:
        return 0
    fits = vector.shape == extents and vector.dtype is torch.float32 and vector.is_contiguous()
    return vector.data_ptr() if fits and in_memory(vector) else -1


def in_memory(tensor: Tensor) -> bool:
    """Whether the numbers of a real tensor lie where it says, found out cheaply; False needs a closer look."""
    try:
        return type(tensor) is Tensor and tensor.is_cpu and tensor.data_ptr() > OFFSETS and not tensor.is_neg()
    except (RuntimeError, NotImplementedError):
        return False  # sparse tensors and the like have no storage to ask for


def readable(name: str, tensor: Tensor) -> Tensor:
    """The tensor with its numbers in memory: a lazily negated, conjugated or all-zero one is written out.

    A ValueError for another device or layout, storage that was freed, or a subclass that only traces, wraps or shards.
    """
    if in_memory(tensor):
        return tensor
    if holds_no_memory(tensor) or tensor.layout != torch.strided or not tensor.is_cpu:
        raise ValueError(
            f"{name}: got a {type(tensor).__name__} on {tensor.device} with layout {tensor.layout}, expected a plain "
            'dense CPU tensor, whose memory the native kernels read; use attn_implementation="adaattn_sdpa"'
        )
    if tensor._is_zerotensor():
        tensor = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.numel() and not tensor.untyped_storage().data_ptr():
        raise ValueError(
            f"{name}: got shape {tuple(tensor.shape)} without memory: its storage was freed; gather the tensor before "
            "attention reads it"
        )
    return tensor


def check_rule(name: str, tensor: Tensor, extents: Sequence[int], dtype: torch.dtype | None, form: Form) -> None:
    """Refuse a tensor of the rules that does not cover the call; the ValueError says what it has and should have.

    An extent of -1 stands for how many segments there are, which the kernels check themselves; a `dtype` of None for
    any floating-point one of theirs. A `form` is `contiguous`, `rows` (each of which is), `strided` (any strides), or
    `broadcast`: any strides, and 1 may stand for an extent.
    """
    shape = tuple(tensor.shape)
    fits = shape == tuple(extents) or (
        len(shape) == len(extents)
        and all(
            extent in (size, -1) or (form == "broadcast" and size == 1)
            for size, extent in zip(shape, extents, strict=True)
        )
    )
    if form == "contiguous":
        fits = fits and tensor.is_contiguous()
    elif form == "rows":
        fits = fits and tensor.stride(-1) == 1
    if not fits:
        expected = tuple("n" if extent < 0 else extent for extent in extents)
        raise ValueError(f"{name}: got shape {shape} with strides {tensor.stride()}, expected {expected}, {form}")
    if not in_memory(tensor) and readable(name, tensor) is not tensor:
        raise ValueError(f"{name}: got a lazily negated or zero tensor, expected numbers in memory")
    if tensor.dtype not in (FLOATS if dtype is None else (dtype,)):
        raise ValueError(f"{name}: got {tensor.dtype}, expected {dtype or 'float32, bfloat16 or float16'}")
