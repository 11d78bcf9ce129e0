"""A mask proxy: carries a `MaskStructure` through a model in place of a dense mask; structures that passes share.

Transformers passes the mask function's result to every layer and sometimes treats it as a tensor: generation makes it
contiguous, accelerate moves it between devices, a few models slice it. `StructuredMask` supports these operations, and
becomes a dense boolean tensor only when somebody computes with it. Calls of like shape share a structure without
tensors, and with it all that was derived from it.
"""

from collections.abc import Hashable
from typing import Any, Self

import torch
from torch import Tensor, nn

from adaattn_hf.attention.structure import MaskStructure

from ..models.families import UnsupportedModel, unsupported

_ADDITIONS = frozenset(("add", "add_", "__add__", "__radd__", "__iadd__"))
_ADDED = unsupported("a model", "adds the attention mask to scores that it computes itself")


class StructuredMask:
    """A `MaskStructure` with the interface of a boolean tensor `[batch, 1, q_len, kv_len]`."""

    ndim = 4
    dtype = torch.bool

    def __init__(
        self, structure: MaskStructure, device: torch.device, fixed_chunks: bool = False, cut: int = 0
    ) -> None:
        """`device` is the device of the dense mask.

        With `fixed_chunks` chunks that count from the row's first key are in the dense mask, and no longer told. `cut`
        first queries of the call were sliced off. Structures with document borders are `packed` by the lengths that
        all layers are told; they lie here, as structures without tensors are shared with later passes.
        """
        self.structure, self.device = structure, device
        self.fixed_chunks, self.cut = fixed_chunks, cut
        self.packed: dict[tuple[int, int], tuple[Tensor, Tensor | None, MaskStructure]] = {}

    def packed_by(self, cu_q: Tensor | None, cu_k: Tensor | None) -> MaskStructure | None:
        """The structure with the document borders of these very tensors, if a layer of the pass has read them."""
        read = self.packed.get((id(cu_q), id(cu_k)))
        return None if read is None else read[2]

    @property
    def shape(self) -> torch.Size:
        """Shape of the dense mask."""
        return torch.Size((self.structure.batch, 1, self.structure.q_len, self.structure.kv_len))

    def dim(self) -> int:
        """Four."""
        return 4

    def size(self, index: int | None = None) -> Any:
        """Like `Tensor.size`."""
        return self.shape if index is None else self.shape[index]

    def contiguous(self, *args: Any, **kwargs: Any) -> Self:
        """Itself."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> "StructuredMask":
        """Moved to a device if one is named; a dtype is ignored, the mask stays boolean."""
        device = kwargs.get("device")
        for argument in args:
            if isinstance(argument, (str, int, torch.device)) and not isinstance(argument, bool):
                device = argument
            elif isinstance(argument, Tensor):
                device = argument.device
        if device is None or torch.device(device) == self.device:
            return self
        target, structure = torch.device(device), self.structure
        # accelerate moves it for every layer of another device: what they share is kept, but a cache's length grows
        grows = isinstance(structure.q_offset, Tensor)
        moved = _moved(structure, target) if grows else structure.cached(_moved, target)
        return StructuredMask(moved, target, self.fixed_chunks, self.cut)

    def dense(self) -> Tensor:
        """Returns the dense boolean mask."""
        return self.structure.visible(device=self.device).expand(self.shape)

    def __getattr__(self, name: str) -> Any:
        """Any other attribute is that of the dense mask."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.dense(), name)

    def __getitem__(self, index: Any) -> Any:
        """The mask of the last queries, as layers that share keys slice it; else a slice of the dense mask."""
        every, structure = slice(None), self.structure
        plain = type(index) is tuple and len(index) == 4 and all(index[i] == every for i in (0, 1, 3))
        rows = index[2] if plain else None
        if type(rows) is not slice or rows.start is None or rows != slice(rows.start, None):
            return self.dense()[index]
        first = max(rows.start + structure.q_len, 0) if rows.start < 0 else rows.start
        changes: dict[str, Any] = {"q_len": structure.q_len - first, "q_offset": structure.q_offset + first}
        if structure.k_segments is not None:
            queries = structure.k_segments if structure.q_segments is None else structure.q_segments
            changes["q_segments"] = queries[:, first:]
        if structure.mask is not None and structure.mask.shape[-2] > 1:
            changes["mask"] = structure.mask[..., first:, :]
        last = structure.with_changes(**changes)
        return StructuredMask(last, self.device, self.fixed_chunks, self.cut + first)

    def __and__(self, other: Any) -> Tensor:
        """Conjunction with a dense mask."""
        both: Tensor = self.dense() & other
        return both

    def __invert__(self) -> Tensor:
        """Hidden instead of visible."""
        return ~self.dense()

    def __add__(self, other: Any) -> Tensor:
        """Refused: adding a boolean mask to scores would not mask anything."""
        raise UnsupportedModel(_ADDED)

    __radd__ = __add__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Gives torch functions the dense mask."""
        if getattr(func, "__name__", "") in _ADDITIONS:
            raise UnsupportedModel(_ADDED)

        def dense(value: Any) -> Any:
            if isinstance(value, StructuredMask):
                return value.dense()
            return type(value)(dense(v) for v in value) if isinstance(value, (list, tuple)) else value

        return func(*dense(tuple(args)), **{name: dense(value) for name, value in (kwargs or {}).items()})


MAX_STRUCTURES = 64
"""Most structures that are kept; every step of a decode adds one, since its keys are one more."""

_structures: dict[Hashable, MaskStructure] = {}

recall = _structures.get


def store_structure(key: Hashable, structure: MaskStructure) -> MaskStructure:
    """Keeps a structure under a key that holds everything it was made from, and returns it."""
    if len(_structures) >= MAX_STRUCTURES:
        _structures.clear()
    _structures[key] = structure
    return structure


def maskless(
    module: nn.Module, q_shape: torch.Size, k_shape: torch.Size, is_causal: bool | None
) -> tuple[int, int, int, bool]:
    """Returns batch, query length, key length and causality of a call without a mask.

    As in stock attention, causality then counts from the first key, and a single query sees all keys.
    """
    batch, _, q_len, _ = q_shape
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", False)
    return batch, q_len, k_shape[2], bool(causal) and q_len > 1


def _moved(structure: MaskStructure, device: torch.device) -> MaskStructure:
    tensors = (field for field in vars(structure).items() if isinstance(field[1], Tensor))
    return structure.with_changes(**{name: tensor.to(device) for name, tensor in tensors})
