"""What a cache hands to attention for keys or values that are not plain tensors of all tokens.

Between the cache and the attention interface, supported models read only a shape, a dtype or a device. A model that
computes with the keys gets an error that says what to do: nothing is dequantised silently.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adaattn_hf.attention.stored import StoredKV

from .formats import channels_of

_REMEDY = (
    'a quantised cache holds codes, not numbers. Load the model with attn_implementation="adaattn"; for a model that '
    'computes with its cached keys itself use a cache of numbers (cache="model", GrowingCache or DynamicCache)'
)


class StoredTensor:
    """Stands for keys or values `[batch, num_kv_heads, length, head_dim]`, with the interface of a tensor.

    Attributes:
        codes: What attention reads: codes, the numbers of a prompt as they came, or, where `streams` holds the tokens
            by groups of heads, a tensor of all tokens' shape without memory.
        record: What turns codes into numbers; None where there are none.
        dtype: Of the model.
        prompt: The layer that has rounded this prompt and rounds its keys again when attention tells it the queries.
        streams: The layer that computes attention over its heads' own tokens.
    """

    ndim = 4

    def __init__(
        self, codes: Tensor, record: StoredKV | None, dtype: torch.dtype, *, prompt: Any = None, streams: Any = None
    ) -> None:
        """Holds what it is given."""
        self.codes, self.record, self.dtype = codes, record, dtype
        self.prompt, self.streams = prompt, streams

    @property
    def device(self) -> torch.device:
        """Where the codes lie."""
        return self.codes.device

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor that this one stands for."""
        return torch.Size((*self.codes.shape[:3], channels_of(self.codes)))

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

    def __getitem__(self, index: Any) -> Any:
        """Refused."""
        raise TypeError(f"cache: a slice was asked of stored keys or values; {_REMEDY}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refused."""
        raise TypeError(f"cache: {getattr(func, '__name__', func)} was called with stored keys or values; {_REMEDY}")
