"""Packs a padded batch into one row of real tokens and pads it again, by gather indices and `cu_seq_lens`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class PackedLayout:
    """Maps the real tokens of `[batch, length]`, row after row, to one packed row `[1, tokens]`, and back.

    Attributes:
        batch, length: Shape of the padded form.
        lengths: Number of real tokens in each row.
        index: `[tokens]` gather indices of the real tokens in the flattened padded form.
        cu_seq_lens: `[batch + 1]` int32, cumulative sums of `lengths` from 0.
        contiguous: Whether no row has padding between real tokens.
        from_first: Whether position 0 of every row is a real token.
    """

    batch: int
    length: int
    lengths: tuple[int, ...]
    index: Tensor
    cu_seq_lens: Tensor
    contiguous: bool
    from_first: bool

    @classmethod
    def of(cls, mask: Tensor) -> PackedLayout:
        """The layout for a padding mask `[batch, length]`, true for real tokens.

        Copies the mask to the host (synchronises).
        """
        host = mask.detach().bool().cpu()
        lengths = host.sum(dim=1)
        columns = torch.arange(host.shape[1], device="cpu")
        first = torch.where(host, columns, host.shape[1]).amin(dim=1)
        last = torch.where(host, columns, -1).amax(dim=1)
        cu_seq_lens = torch.zeros(len(lengths) + 1, dtype=torch.int32, device="cpu")
        cu_seq_lens[1:] = lengths.cumsum(0)
        return cls(
            batch=host.shape[0],
            length=host.shape[1],
            lengths=tuple(lengths.tolist()),
            index=host.flatten().nonzero().flatten().to(mask.device),
            cu_seq_lens=cu_seq_lens.to(mask.device),
            contiguous=bool(((last - first + 1).clamp(min=0) == lengths).all()),
            from_first=bool(host[:, 0].all()),
        )

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Column of the first real token of each row, `length` where a row has none."""
        if not self.tokens:
            return (self.length,) * self.batch
        first = self.index.cpu()[self.cu_seq_lens[:-1].cpu().long().clamp_max(self.tokens - 1)]
        columns = (first % self.length).tolist()
        return tuple(
            column if count else self.length for column, count in zip(columns, self.lengths, strict=True)
        )

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
