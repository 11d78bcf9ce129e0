"""A tensor proxy for quantised keys or values: carries codes and dequantisation parameters from cache to attention.

Between the cache and the attention interface, supported models read only a shape, a dtype or a device. A model that
computes with the keys gets an error that says what to do: nothing is dequantised silently.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adaattn_hf.attention.stored import StoredKV

_REMEDY = (
    'a quantised cache holds codes, not numbers. Load the model with attn_implementation="adaattn"; for a model that '
    'computes with its cached keys itself use a cache of numbers (cache="model", GrowingCache or DynamicCache)'
)


class StoredTensor:
    """Codes of keys or values with the interface of a tensor `[batch, num_kv_heads, length, head_dim]`."""

    ndim = 4

    def __init__(
        self, codes: Tensor, record: StoredKV | None, head_dim: int, dtype: torch.dtype, streams: Any = None
    ) -> None:
        """Stands for keys or values.

        Where `streams` holds the tokens by groups of heads, there is no record, and codes have all tokens' shape and no
        memory.
        """
        self.codes, self.record = codes, record
        self.head_dim, self.dtype = head_dim, dtype
        self.streams = streams

    @property
    def device(self) -> torch.device:
        """Where the codes lie."""
        return self.codes.device

    @property
    def shape(self) -> torch.Size:
        """Shape of the dequantised tensor."""
        return torch.Size((*self.codes.shape[:3], self.head_dim))

    def size(self, dim: int | None = None) -> Any:
        """Like `Tensor.size`."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Four."""
        return 4

    def numel(self) -> int:
        """Elements of the dequantised tensor."""
        return self.shape.numel()

    def __getattr__(self, name: str) -> Any:
        """Refused: any other use of keys needs dequantised numbers."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        raise TypeError(f"cache: .{name} was asked of stored keys or values; {_REMEDY}")

    def __getitem__(self, index: Any) -> Any:
        """Refused."""
        raise TypeError(f"cache: a slice was asked of stored keys or values; {_REMEDY}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refused."""
        raise TypeError(f"cache: {getattr(func, '__name__', func)} was called with stored keys or values; {_REMEDY}")
