"""A tensor that tokens are appended to without copying the past each time.

Appending by concatenation moves the whole past for every new token. Here tokens are written behind the past
into spare room. Only when the room is used up is the past copied, into `growth` times the room, so that each
appended token costs `1 / (growth - 1)` copied tokens on average, whatever the length.

Memory that somebody may still read is not written again, as if every change had made new tensors: where a view of
tokens that are taken off, or of rows that change, is held elsewhere, what is kept moves to another room first.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

GROWTH = 1.25
# Room is given out in whole blocks of tokens, so that short sequences do not move at every step.
BLOCK = 64


class GrowingTensor:
    """`[batch, heads, length, …]`, of which `length` changes in place, in a `room` that stays until something moves.

    `view()` is a window on the storage: its batch and head strides belong to the room, not to the length. A window that
    was taken earlier stays what it was, whatever follows. Before `crop` and `select` let go of windows that nobody
    needs: those that are held cost a copy.
    """

    room: Tensor

    def __init__(self, like: Tensor, *, reserve: int = 0, growth: float = GROWTH, most: int | None = None) -> None:
        """Empty, with room for `reserve` tokens, at most for `most`; `like` gives all extents but the length."""
        self.reserve, self.growth, self.most = reserve, growth, most
        self._refill(like[:, :, :0], reserve)

    def __len__(self) -> int:
        """Tokens held."""
        return self._stop - self._start

    @property
    def capacity(self) -> int:
        """Tokens that fit in without moving."""
        return self.room.shape[2]

    def view(self, last: int | None = None) -> Tensor:
        """`[batch, heads, length, …]`: all tokens or the `last` ones; shares the storage."""
        start = self._start if last is None else max(self._start, self._stop - last)
        return self.room.narrow(2, start, self._stop - start)

    def append(self, tokens: Tensor) -> Tensor:
        """Write `[batch, heads, n, …]` behind what is there; returns all tokens, as `view` does."""
        self.widen(tokens.dtype)
        held = self.extend(tokens.shape[2])
        held.narrow(2, len(self) - tokens.shape[2], tokens.shape[2]).copy_(tokens)
        return held

    def widen(self, dtype: torch.dtype) -> None:
        """Keep tokens of two dtypes, as under autocast and after it, all in the wider one: as by concatenation."""
        if dtype is not self.room.dtype:
            self.room = self.room.to(torch.promote_types(self.room.dtype, dtype))

    def extend(self, count: int) -> Tensor:
        """Hold `count` tokens more behind what is there, to be written at once; returns all tokens, as `view` does."""
        if self._stop + count > self.capacity or self._shared or self._frozen():
            self.renew(count)
        self._stop += count
        return self.view()

    def _frozen(self) -> bool:
        return self.room.is_inference() and not torch.is_inference_mode_enabled()

    def _viewed(self) -> bool:
        return _uses(self.room) > _uses(torch.empty(0, dtype=torch.uint8, device="cpu"))

    def renew(self, count: int = 0) -> None:
        """Move what is there to a room of its own, with space for `count` tokens more."""
        needed = len(self) + count
        size = self._size(needed)
        self._refill(self.view(), size if self.most is None else min(size, max(self.most, needed)))

    def _size(self, tokens: int) -> int:
        return max(self.reserve, BLOCK * math.ceil(tokens * self.growth / BLOCK))

    def _refill(self, past: Tensor, tokens: int, device: torch.device | str | None = None) -> None:
        length = past.shape[2]
        extents = (*past.shape[:2], max(tokens, length), *past.shape[3:])
        room = torch.empty(extents, dtype=past.dtype, device=past.device if device is None else device)
        # to the host it waits: what arrives in a strided room goes through one that the host itself copies from
        room[:, :, :length].copy_(past, non_blocking=room.device.type != "cpu")
        self.room, self._start, self._stop = room, 0, length
        self._shared = False  # whether somebody holds a view of what lies behind the last token

    def crop(self, count: int) -> None:
        """Forget the last `count` tokens; nothing moves before the next token comes."""
        stop = max(self._start, self._stop - count)
        self._shared = self._shared or (stop < self._stop and self._viewed())
        self._stop = stop

    def keep_last(self, keep: int) -> None:
        """Forget all but the last `keep` tokens, and give room back that they will not need soon."""
        self._start = max(self._start, self._stop - keep)
        size = self._size(len(self) + 1)
        # not at once, so that drafts that come and go move nothing
        if 2 * self.capacity > 3 * size:
            self._refill(self.view(), size)

    def select(self, rows: Tensor) -> None:
        """Make batch row `i` what row `rows[i]` was (`rows` `[new batch]`, integers or a boolean choice).

        With as many rows as before only those that change are copied.
        """
        rows = rows.to(self.room.device)
        if rows.dtype == torch.bool:
            rows = rows.nonzero().flatten()
        if len(rows) == self.room.shape[0]:
            same = torch.arange(len(rows), dtype=rows.dtype, device=rows.device)
            moved = (rows != same).nonzero().flatten()
            if len(moved) == 0:
                return
            if not self._frozen() and not self._viewed():
                past = self.view()
                past[moved] = past[rows[moved]]
                return
        self._refill(self.view()[rows], self.capacity - self._start)

    def repeat(self, times: int) -> None:
        """Repeat each batch row `times` times, one behind the other."""
        if times != 1:
            self._refill(self.view().repeat_interleave(times, dim=0), self.capacity - self._start)

    def to(self, device: torch.device | str) -> None:
        """Move the tokens to a device; spare room is not copied."""
        if torch.device(device) != self.room.device:
            self._refill(self.view(), self.capacity - self._start, device)


def check_room(reserve: int, growth: float, max_cache_len: int | None = None) -> None:
    """Refuse room that no tokens could be kept in (ValueError)."""
    if not isinstance(growth, (int, float)) or not growth > 1:
        raise ValueError(f"growth: got {growth!r}, expected a factor larger than 1, such as 1.25")
    if not isinstance(reserve, int) or reserve < 0:
        raise ValueError(f"reserve: got {reserve!r}, expected a number of tokens, 0 or more")
    if max_cache_len is not None and (not isinstance(max_cache_len, int) or max_cache_len < max(reserve, 1)):
        raise ValueError(
            f"max_cache_len: got {max_cache_len!r}, expected a number of tokens, {max(reserve, 1)} or more"
            f"{', as reserve says' if reserve else ''}; leave it out and the cache grows"
        )


def _uses(tensor: Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
