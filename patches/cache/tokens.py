"""The tokens of one layer as a quantised cache keeps them: codes, scales, and what belongs to a sequence as a whole."""

from __future__ import annotations

import torch
from torch import Tensor

from adaattn_hf.attention.stored import StoredKV, hadamard
from adaattn_hf.backends.native.storing import write

from .carrier import StoredTensor
from .growing import GROWTH, GrowingTensor

__all__ = ["SMOOTHED", "StoredTokens", "value_width"]

SMOOTHED = 16
"""Tokens of a sequence from which the mean of its keys is taken; before so many are there nothing is taken off."""


PARTS = ("key_codes", "key_scale", "value_codes", "value_scale")


def value_width(stored: str, head_dim: int) -> tuple[torch.dtype, int]:
    """The dtype and the bytes of a value's codes."""
    return (torch.uint8, head_dim // 2) if stored == "k8v4" else (torch.int8, head_dim)


class StoredTokens:
    """Codes and scales `[batch, num_kv_heads, length, …]` that grow in place."""

    def __init__(
        self, keys: Tensor, values: Tensor, stored: str, reserve: int = 0, growth: float = GROWTH
    ) -> None:
        """Empty, for tokens shaped like these `[batch, num_kv_heads, any, head_dim]`.

        Args:
            keys, values: Give extents, dtype and device.
            stored: One of `adaattn_hf.attention.stored.FORMATS`.
            reserve, growth: As in `GrowingTensor`.
        """
        batch, heads = keys.shape[:2]
        width, self.dim_v = keys.shape[3], values.shape[3]
        code, value_bytes = value_width(stored, self.dim_v)
        extents = ((torch.int8, width), (torch.uint8, 1), (code, value_bytes), (torch.uint8, 1))
        self.dtype = keys.dtype
        self.parts = tuple(
            GrowingTensor(
                torch.empty((batch, heads, 0, size), dtype=dtype, device=keys.device),
                reserve=reserve,
                growth=growth,
            )
            for dtype, size in extents
        )
        self.mean: Tensor | None = None
        self.first: Tensor | None = None

    def __len__(self) -> int:
        """Tokens held."""
        return len(self.parts[0])

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Round `[batch, num_kv_heads, n, head_dim]` and write them behind what is there."""
        length, count = len(self), keys.shape[2]
        if not count:
            return
        if not length:
            self.first = keys[:, :, 0].float().contiguous()
            self.mean = self._mean_of(keys.float()) if count >= SMOOTHED else None
        elif self.mean is None and length + count >= SMOOTHED:
            self._smooth(keys)
        key_codes, key_scale, value_codes, value_scale = (part.extend(count) for part in self.parts)
        write(keys, key_codes, key_scale[..., 0], mean=self.mean)
        write(values, value_codes, value_scale[..., 0])

    @staticmethod
    def _mean_of(keys: Tensor) -> Tensor:
        """The mean of the turned keys, fp32 `[batch, num_kv_heads, head_dim]`."""
        return (keys.mean(dim=2) @ hadamard(keys.shape[3], keys.device)).contiguous()

    def _smooth(self, more: Tensor) -> None:
        """Take the mean, now that there are keys enough, and round the few that were there anew."""
        there = self.record().keys(self.parts[0].view(), torch.float32)
        self.mean = self._mean_of(torch.cat([there, more.float()], dim=2))
        write(there, self.parts[0].view(), self.parts[1].view()[..., 0], mean=self.mean)

    def record(self, last: int | None = None) -> StoredKV:
        """What turns the codes, or those of the `last` tokens, into numbers."""
        first = self.first if last is None or last >= len(self) else None
        return StoredKV(self.parts[1].view(last)[..., 0], self.parts[3].view(last)[..., 0], self.mean, first)

    def carriers(self, last: int | None = None) -> tuple[StoredTensor, StoredTensor]:
        """All keys and all values, or the `last` ones, as attention reads them."""
        record, keys = self.record(last), self.parts[0].view(last)
        return (
            StoredTensor(keys, record, keys.shape[3], self.dtype),
            StoredTensor(self.parts[2].view(last), record, self.dim_v, self.dtype),
        )

    def held(self) -> dict[str, Tensor]:
        """Everything that the tokens are, by name; `take` of empty tokens is the way back."""
        named = dict(zip(PARTS, (part.view() for part in self.parts), strict=True))
        return named | {k: t for k, t in (("mean", self.mean), ("first", self.first)) if t is not None}

    def take(self, held: dict[str, Tensor]) -> None:
        """Become what `held` says."""
        for name, part in zip(PARTS, self.parts, strict=True):
            part.append(held[name])
        self.mean, self.first = held.get("mean"), held.get("first")

    def crop(self, count: int) -> None:
        """Forget the last `count` tokens."""
        for part in self.parts:
            part.crop(count)

    def drop_front(self, keep: int) -> None:
        """Forget all but the last `keep` tokens, and give back room that a long prompt took."""
        if len(self) > keep:
            self.first = None
        for part in self.parts:
            part.drop_front(keep)
            part.trim()

    def select(self, rows: Tensor) -> None:
        """Make batch row `i` what row `rows[i]` was."""
        for part in self.parts:
            part.select(rows)
        self.mean, self.first = (None if t is None else t[rows.to(t.device)] for t in (self.mean, self.first))

    def repeat(self, times: int) -> None:
        """Repeat each batch row."""
        for part in self.parts:
            part.repeat(times)
        self.mean, self.first = (
            None if t is None else t.repeat_interleave(times, dim=0) for t in (self.mean, self.first)
        )

    def to(self, device: torch.device | str) -> None:
        """Move everything to a device."""
        for part in self.parts:
            part.to(device)
        self.mean, self.first = (None if t is None else t.to(device) for t in (self.mean, self.first))

    @property
    def per_token(self) -> int:
        """Bytes of a token of one sequence."""
        return sum(part.per_token for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the room, of tokens and of what belongs to the sequences."""
        return sum(part.nbytes for part in self.parts) + sum(
            t.nbytes for t in (self.mean, self.first) if t is not None
        )
