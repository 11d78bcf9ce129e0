"""Where the real tokens of a padded batch lie, and the two ways between both forms."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["PackedLayout"]


@dataclass(frozen=True, eq=False)
class PackedLayout:
    """The real tokens of `[batch, length]`, row after row, as one row of `tokens`.

    Attributes:
        batch, length: Extents of the padded form.
        lengths: Real tokens of each row.
        index: `[tokens]` place of each real token in the flattened padded form.
        cu_seq_lens: `[batch + 1]` int32 running sums of `lengths`, starting with 0.
        contiguous: No row has padding between real tokens.
        from_first: The first place of every row is a real token.
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
        """The layout of a 2-D mask `[batch, length]`, true for real tokens.

        Reads the mask once (synchronises).
        """
        host = mask.detach().bool().cpu()
        lengths = host.sum(dim=1)
        places = torch.arange(host.shape[1], device="cpu")
        first = torch.where(host, places, host.shape[1]).amin(dim=1)
        last = torch.where(host, places, -1).amax(dim=1)
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
        """Place of the first real token of each row, `length` where a row has none."""
        if not self.tokens:
            return (self.length,) * self.batch
        first = self.index.cpu()[self.cu_seq_lens[:-1].cpu().long().clamp_max(self.tokens - 1)]
        places = (first % self.length).tolist()
        return tuple(
            place if count else self.length for place, count in zip(places, self.lengths, strict=True)
        )

    @property
    def tokens(self) -> int:
        """Number of real tokens."""
        return len(self.index)

    @property
    def full(self) -> bool:
        """There is no padding."""
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
        """The tensor is `[1, tokens, features]` of this layout."""
        return tensor.ndim == 3 and tensor.shape[0] == 1 and tensor.shape[1] == self.tokens
