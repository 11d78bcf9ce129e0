"""Packs a padded batch into one row of real tokens and pads it again, by gather indices and `cu_seq_lens`."""

from __future__ import annotations

import torch
from torch import Tensor


class PackedLayout:
    """Maps the real tokens of `[batch, length]`, row after row, to one packed row `[1, tokens]`, and back.

    Attributes:
        batch, length: Shape of the padded form.
        lengths: Number of real tokens in each row.
        starts: Column of the first real token of each row, `length` where a row has none.
        index: `[tokens]` gather indices of the real tokens in the flattened padded form.
        cu_seq_lens: `[batch + 1]` int32, cumulative sums of `lengths` from 0.
        contiguous: Whether no row has padding between real tokens.
    """

    def __init__(self, mask: Tensor) -> None:
        """The layout for a padding mask `[batch, length]`, true for real tokens; copies it to the host."""
        real = mask.detach().bool().cpu()
        self.batch, self.length = real.shape
        counts, ones = real.sum(dim=1), real.int()
        first = torch.where(real.any(1), ones.argmax(1), self.length)
        last = self.length - 1 - ones.flip(1).argmax(1)
        self.lengths: tuple[int, ...] = tuple(counts.tolist())
        self.starts: tuple[int, ...] = tuple(first.tolist())
        self.index = real.flatten().nonzero().flatten().to(mask.device)
        self.cu_seq_lens = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int().to(mask.device)
        self.contiguous = bool(((last - first + 1 == counts) | (counts == 0)).all())

    @property
    def from_first(self) -> bool:
        """Whether position 0 of every row is a real token."""
        return not any(self.starts)

    @property
    def tokens(self) -> int:
        """Number of real tokens."""
        return len(self.index)

    @property
    def full(self) -> bool:
        """Whether there is no padding."""
        return self.tokens == self.batch * self.length

    def pack(self, padded: Tensor) -> Tensor:
        """`[batch, length, ...]` to `[1, tokens, ...]`."""
        return padded.flatten(0, 1).index_select(0, self.index.to(padded.device))[None]

    def pad(self, packed: Tensor) -> Tensor:
        """`[1, tokens, ...]` to `[batch, length, ...]`; padding is zero."""
        flat = packed.new_zeros((self.batch * self.length, *packed.shape[2:]))
        flat = flat.index_copy_(0, self.index.to(packed.device), packed[0])
        return flat.view(self.batch, self.length, *packed.shape[2:])

    def pad_heads(self, packed: Tensor) -> Tensor:
        """`[1, heads, tokens, head_dim]` to `[batch, heads, length, head_dim]`; padding is zero."""
        return self.pad(packed.transpose(1, 2)).transpose(1, 2)

    def is_packed(self, tensor: Tensor) -> bool:
        """Whether a tensor has this layout's packed shape `[1, tokens, features]`."""
        return tensor.ndim == 3 and tensor.shape[0] == 1 and tensor.shape[1] == self.tokens
