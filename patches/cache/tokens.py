"""Storage for the keys and values of some heads: in the model's dtype, or quantised as codes with scales."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from adaattn_hf.attention.stored import StoredKV, direction_of, hadamard

from .carrier import StoredTensor
from .growing import GROWTH, GrowingTensor
from .rounding import write

SMOOTHED = 16
"""Tokens after which the mean of a sequence's keys is computed and subtracted before quantisation."""
PROMPT = "_adaattn_prompt"
"""Attribute of a prompt's keys on their way to attention: the `StoredTokens` that they were rounded into."""


PARTS = ("key_codes", "key_scale", "value_codes", "value_scale")
BESIDE = ("mean", "first", "along")


def value_width(stored: str, head_dim: int) -> tuple[torch.dtype, int]:
    """The dtype and the bytes of a value's codes."""
    return (torch.uint8, head_dim // 2) if stored == "k8v4" else (torch.int8, head_dim)


class Tokens:
    """Keys and values `[batch, num_kv_heads, length, head_dim]` in the model's dtype that grow in place."""

    names: tuple[str, ...] = ("keys", "values")

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        reserve: int = 0,
        growth: float = GROWTH,
        most: int | None = None,
    ) -> None:
        """Empty, for tokens shaped like these `[batch, num_kv_heads, any, head_dim]`.

        Args:
            keys, values: Give extents, dtype and device.
            reserve, growth, most: As in `GrowingTensor`.
        """
        batch, heads = keys.shape[:2]
        self.dtype, self.dim_v = keys.dtype, values.shape[3]
        self.parts = tuple(
            GrowingTensor(
                torch.empty((batch, heads, 0, *size), dtype=dtype, device=keys.device),
                reserve=reserve,
                growth=growth,
                most=most,
            )
            for dtype, size in self._extents(keys, values)
        )

    def _extents(self, keys: Tensor, values: Tensor) -> tuple[tuple[torch.dtype, Sequence[int]], ...]:
        """Dtype and extents of a token of each part."""
        return (keys.dtype, keys.shape[3:]), (values.dtype, values.shape[3:])

    def __len__(self) -> int:
        """Tokens held."""
        return len(self.parts[0])

    def append(self, keys: Tensor, values: Tensor, begun: bool = False) -> list[Tensor]:
        """Write `[batch, num_kv_heads, n, head_dim]` behind what is there; returns the parts of all tokens.

        `begun`: `begin` has seen them.
        """
        count, past = keys.shape[2], len(self.parts[0])
        if count and not begun:
            self.begin(keys)
        views = [part.extend(count) for part in self.parts]
        if count:
            self.write(keys, values, views, past)
        return views

    def begin(self, keys: Tensor) -> None:
        """Prepare for these keys, which are written next."""

    def expect(self, queries: Tensor) -> None:
        """Prepare to be read by queries like those of a prompt, `[batch, heads, n, head_dim]`."""

    def write(self, keys: Tensor, values: Tensor, parts: Sequence[Tensor], at: int = 0) -> None:
        """Write tokens into parts `[batch, num_kv_heads, length, …]` from place `at` on."""
        count = keys.shape[2]
        parts[0].narrow(2, at, count).copy_(keys)
        parts[1].narrow(2, at, count).copy_(values)

    def views(self) -> list[Tensor]:
        """The parts of all tokens held, which share the storage."""
        return [part.view() for part in self.parts]

    def read(self, parts: Sequence[Tensor], first: bool = True) -> tuple[Tensor, Tensor, StoredKV | None]:
        """Keys, values and what turns them into numbers; `first`: the sequence's first key is the first of them."""
        return parts[0], parts[1], None

    def renew_first(self, rows: Sequence[int], parts: Sequence[Tensor]) -> None:
        """Replace the first key of sequences `rows` by parts `[rows, num_kv_heads, …]`; without parts drop all."""

    def held(self) -> dict[str, Tensor]:
        """All tensors of the storage, by name; `take` puts them into empty storage."""
        return dict(zip(self.names, self.views(), strict=True))

    def take(self, held: dict[str, Tensor]) -> None:
        """Fill this empty storage with what `held` gave."""
        for name, part in zip(self.names, self.parts, strict=True):
            part.append(held[name])

    def crop(self, count: int) -> None:
        """Forget the last `count` tokens."""
        for part in self.parts:
            part.crop(count)

    def select(self, rows: Tensor) -> None:
        """Make batch row `i` what row `rows[i]` was."""
        for part in self.parts:
            part.select(rows)

    def repeat(self, times: int) -> None:
        """Repeat each batch row."""
        for part in self.parts:
            part.repeat(times)

    def to(self, device: torch.device | str) -> None:
        """Move everything to a device."""
        for part in self.parts:
            part.to(device)

    @property
    def per_token(self) -> int:
        """Bytes of a token of one sequence."""
        return sum(part.per_token for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the room, of tokens and of what belongs to the sequences."""
        return sum(part.nbytes for part in self.parts)


class StoredTokens(Tokens):
    """Codes `[batch, num_kv_heads, length, …]` and scales `[batch, num_kv_heads, length]` that grow in place."""

    names = PARTS

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        stored: str,
        reserve: int = 0,
        growth: float = GROWTH,
        most: int | None = None,
    ) -> None:
        """As `Tokens`; `stored` is one of `adaattn_hf.attention.stored.FORMATS`."""
        self._stored = stored
        super().__init__(keys, values, reserve, growth, most)
        self.mean: Tensor | None = None
        self.first: Tensor | None = None
        self.along: Tensor | None = None

    def _extents(self, keys: Tensor, values: Tensor) -> tuple[tuple[torch.dtype, Sequence[int]], ...]:
        dtype, width = value_width(self._stored, values.shape[3])
        return (torch.int8, keys.shape[3:]), (torch.uint8, ()), (dtype, (width,)), (torch.uint8, ())

    def begin(self, keys: Tensor) -> None:
        """Keep a sequence's first key, and take the mean of its keys once there are enough."""
        length, count = len(self), keys.shape[2]
        if not length:
            self.first = keys[:, :, 0].float().contiguous()
            self.mean = self._mean_of(keys.float()) if count >= SMOOTHED else None
        elif self.mean is None and length + count >= SMOOTHED:
            self._smooth(keys)

    def write(self, keys: Tensor, values: Tensor, parts: Sequence[Tensor], at: int = 0) -> None:
        """Round tokens into the parts from place `at` on."""
        write(keys, parts[0], parts[1], mean=self.mean, along=self.along, at=at)
        write(values, parts[2], parts[3], at=at)

    def expect(self, queries: Tensor) -> None:
        """From now on round keys such that their errors cancel along the mean of these queries."""
        enough = queries.shape[2] >= SMOOTHED
        heads, device = self.parts[0].view().shape[1], self.parts[0].device
        self.along = direction_of(queries, heads).to(device) if enough else None

    def reread(self, queries: Tensor, keys: Tensor) -> None:
        """Round the keys of a prompt, the only tokens held, again, now that its queries are known."""
        self.expect(queries)
        if self.along is not None:
            views = self.views()
            keys = keys[:, :, -len(self) :].to(
                views[0].device
            )  # a cache that offloads has moved its own by now
            write(keys, views[0], views[1], mean=self.mean, along=self.along)

    @staticmethod
    def _mean_of(keys: Tensor) -> Tensor:
        """The mean of the rotated keys, fp32 `[batch, num_kv_heads, head_dim]`."""
        return (keys.mean(dim=2) @ hadamard(keys.shape[3], keys.device)).contiguous()

    def _smooth(self, more: Tensor) -> None:
        """Take the mean, now that there are enough keys, and round again those already held, elsewhere than seen."""
        for part in self.parts:
            part.renew()
        views = self.views()
        there = self.record(views).keys(views[0], torch.float32)
        self.mean = self._mean_of(torch.cat([there, more.float()], dim=2))
        write(there, views[0], views[1], mean=self.mean, along=self.along)

    def record(self, parts: Sequence[Tensor], first: bool = True) -> StoredKV:
        """What turns these parts into numbers."""
        return StoredKV(parts[1], parts[3], self.mean, self.first if first else None)

    def read(self, parts: Sequence[Tensor], first: bool = True) -> tuple[Tensor, Tensor, StoredKV | None]:
        """Codes of keys and of values, and what turns them into numbers."""
        return parts[0], parts[2], self.record(parts, first)

    def renew_first(self, rows: Sequence[int], parts: Sequence[Tensor]) -> None:
        """Replace the first key of sequences `rows` by the numbers that these codes stand for."""
        if not parts:
            self.first = None
        elif self.first is not None and rows:
            mean = None if self.mean is None else self.mean[list(rows)]
            record = StoredKV(parts[1][..., None], parts[3][..., None], mean)
            self.first = self.first.index_put(
                (torch.tensor(rows, dtype=torch.int64, device=self.first.device),),
                record.keys(parts[0][:, :, None], torch.float32)[:, :, 0],
            )

    def carriers(
        self, parts: Sequence[Tensor] | None = None, last: int | None = None
    ) -> tuple[StoredTensor, StoredTensor]:
        """All keys and all values, or the `last` ones, as attention reads them; `parts`: of all, where at hand."""
        if parts is None:
            parts = [part.view(last) for part in self.parts]
        record = self.record(parts, last is None or last >= len(self))
        return (
            StoredTensor(parts[0], record, parts[0].shape[3], self.dtype),
            StoredTensor(parts[2], record, self.dim_v, self.dtype),
        )

    def held(self) -> dict[str, Tensor]:
        """All tensors of the storage, by name; `take` puts them into empty storage."""
        beside = {name: getattr(self, name) for name in BESIDE}
        return super().held() | {name: t for name, t in beside.items() if t is not None}

    def take(self, held: dict[str, Tensor]) -> None:
        """Fill this empty storage with what `held` gave."""
        super().take(held)
        self.mean, self.first, self.along = (held.get(name) for name in BESIDE)

    def drop_front(self, keep: int) -> None:
        """Forget all but the last `keep` tokens, and give back room that a long prompt took."""
        if len(self) > keep:
            self.first = None
        for part in self.parts:
            part.drop_front(keep)
            part.trim()

    def select(self, rows: Tensor) -> None:
        """Make batch row `i` what row `rows[i]` was."""
        super().select(rows)
        self._beside(lambda t: t[rows.to(t.device)])

    def repeat(self, times: int) -> None:
        """Repeat each batch row."""
        super().repeat(times)
        self._beside(lambda t: t.repeat_interleave(times, dim=0))

    def to(self, device: torch.device | str) -> None:
        """Move everything to a device."""
        super().to(device)
        self._beside(lambda t: t.to(device))

    def _beside(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change what belongs to the sequences."""
        for name in BESIDE:
            there = getattr(self, name)
            setattr(self, name, None if there is None else change(there))

    @property
    def nbytes(self) -> int:
        """Bytes of the room, of tokens and of what belongs to the sequences."""
        return super().nbytes + sum(t.nbytes for t in (self.mean, self.first, self.along) if t is not None)
