"""Room for the tokens of a cache: tensors that grow in place, or that have all their room from the start.

Appending by concatenation moves the whole past for every new token. Here tokens are written behind the past into spare
room. Only when the room is used up is the past copied, into `growth` times the room, so that each appended token costs
`1 / (growth - 1)` copied tokens on average, whatever the length.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple, Self

import torch
from torch import Tensor

GROWTH = 1.25
# Room is given out in whole blocks of tokens, so that short sequences do not move at every step.
BLOCK = 64


class Room(NamedTuple):
    """How much room a store makes.

    Attributes:
        reserve: Tokens that fit in from the start.
        growth: Factor on the length where room is used up.
        limit: Tokens that there may be; None for any number.
        fixed: The room never moves and its tokens are counted on the device, so that graphs which are captured can
            write and read it.
        ring: Of a fixed room that is used again and again: the first tokens, which stay, and how many may come.
    """

    reserve: int = 0
    growth: float = GROWTH
    limit: int | None = None
    fixed: bool = False
    ring: tuple[int, int] | None = None

    @classmethod
    def of(cls, reserve: int = 0, growth: float = GROWTH, max_cache_len: int | None = None) -> Self:
        """As a user asks for it. ValueError for room that no tokens could be kept in."""
        if not isinstance(growth, (int, float)) or not growth > 1:
            raise ValueError(f"growth: got {growth!r}, expected a factor larger than 1, such as 1.25")
        if not isinstance(reserve, int) or reserve < 0:
            raise ValueError(f"reserve: got {reserve!r}, expected a number of tokens, 0 or more")
        if max_cache_len is not None and (not isinstance(max_cache_len, int) or max_cache_len < max(reserve, 1)):
            raise ValueError(
                f"max_cache_len: got {max_cache_len!r}, expected a number of tokens, {max(reserve, 1)} or more"
                f"{', as reserve says' if reserve else ''}; leave it out and the cache grows"
            )
        return cls(reserve if max_cache_len is None else max_cache_len, growth, max_cache_len)

    def size(self, tokens: int) -> int:
        """How many tokens a new room for so many has place for; spare ones where they are more than was reserved."""
        if tokens <= self.reserve:
            return self.reserve
        size = BLOCK * math.ceil(tokens * self.growth / BLOCK)
        return size if self.limit is None else min(size, max(self.limit, tokens))

    def check(self, length: int) -> None:
        """Refuse more tokens than `max_cache_len` says (ValueError)."""
        if self.limit is not None and length > self.limit:
            raise ValueError(
                f"max_cache_len: got {self.limit}, expected at least {length}, the tokens to be kept; "
                "make the cache longer, or leave max_cache_len out and it grows"
            )


def empty(extents: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Memory for tokens; what is made in inference mode could not be written to outside of it."""
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
        return torch.empty(extents, dtype=dtype, device=device)


class Store:
    """Parts of tokens, `[batch, heads, length, …]` each, of which `length` changes in place.

    Views share the memory. How long they stay what they are is said in the package's docstring.

    Attributes:
        rooms: The parts by name, `[batch, heads, room, …]`.
        per_sequence: What belongs to a sequence as a whole, by name, `[batch, …]`.
        count: Tokens held, of a ring those that came, as a tensor on the device, of a fixed room; else None.
    """

    def __init__(self, rooms: dict[str, Tensor], room: Room) -> None:
        """Holds no token yet in these rooms, which are its own."""
        self.room, self.rooms = room, rooms
        self.per_sequence: dict[str, Tensor] = {}
        self.count: Tensor | None = None
        self._start = 0
        self._stop: int | None = 0
        if room.fixed:
            with torch.inference_mode(False):
                self.count = torch.zeros((), dtype=torch.int64, device=self.device)

    # ---------------- what is held
    def __len__(self) -> int:
        """Tokens held; behind a compiled step the host has to ask the device."""
        if self._stop is None:
            self._stop = min(int(self.count), self.capacity)  # type: ignore[arg-type]
        return self._stop - self._start

    @property
    def batch(self) -> int:
        """Sequences held."""
        return next(iter(self.rooms.values())).shape[0]

    @property
    def device(self) -> torch.device:
        """Where the tokens lie."""
        return next(iter(self.rooms.values())).device

    @property
    def capacity(self) -> int:
        """Tokens that fit in without moving."""
        return next(iter(self.rooms.values())).shape[2] - self._start

    def views(self, last: int | None = None) -> list[Tensor]:
        """The parts of all tokens held, or of the `last` ones."""
        length = len(self)
        count = length if last is None else min(last, length)
        return [room.narrow(2, self._start + length - count, count) for room in self.rooms.values()]

    def held(self) -> dict[str, Tensor]:
        """All tensors by name, without spare room; `take` puts them into an empty store."""
        return dict(zip(self.rooms, self.views(), strict=True)) | self.per_sequence

    def take(self, held: Mapping[str, Tensor]) -> None:
        """Fill this empty store with what `held` gave."""
        parts = [held[name] for name in self.rooms]
        self._move(parts, self.room.size(parts[0].shape[2]))
        self._counted()
        self.per_sequence = {name: tensor for name, tensor in held.items() if name not in self.rooms}

    # ---------------- writing
    def concatenate(self, *tokens: Tensor) -> None:
        """Hold a tensor `[batch, heads, n, …]` for each part behind what is there, without writing to what is there."""
        views = [torch.cat(pair, dim=2) for pair in zip(self.views(), tokens, strict=True)]
        self.rooms = dict(zip(self.rooms, views, strict=True))
        self._start, self._stop = 0, views[0].shape[2]

    def widen(self, *tokens: Tensor) -> None:
        """Keep tokens of two dtypes, as under autocast and after it, all in the wider one: as by concatenation."""
        if any(room.dtype is not new.dtype for room, new in zip(self.rooms.values(), tokens, strict=True)):
            views = zip(self.views(), tokens, strict=True)
            self._move([old.to(torch.promote_types(old.dtype, new.dtype)) for old, new in views], self.capacity)

    def extend(self, count: int) -> list[Tensor]:
        """Hold `count` tokens more behind what is there, to be written at once; returns `views`, a fixed room whole."""
        length = len(self) + count
        if self.count is None and length > self.capacity:
            self._move(self.views(), self.room.size(length))
        self._stop = self._start + length
        self._counted()
        return self.views() if self.count is None else list(self.rooms.values())

    def counted_on_the_device(self) -> None:
        """A graph has written tokens: from now on only the device knows how many there are."""
        self._stop = None

    def _counted(self) -> None:
        if self.count is not None and self.room.ring is None:
            self.count.fill_(len(self))

    def _move(self, views: Iterable[Tensor], size: int, device: torch.device | str | None = None) -> None:
        """Copy tokens into rooms of their own, of `size` tokens at least."""
        moved, length = [], 0
        for view in views:
            length = view.shape[2]
            extents = (*view.shape[:2], max(size, length), *view.shape[3:])
            room = empty(extents, view.dtype, view.device if device is None else device)
            # to the host it waits: what arrives in a strided room goes through one that the host itself copies from
            room[:, :, :length].copy_(view, non_blocking=room.device.type != "cpu")
            moved.append(room)
        self.rooms = dict(zip(self.rooms, moved, strict=True))
        self._start, self._stop = 0, length

    # ---------------- changing
    def crop(self, count: int) -> None:
        """Forget the last `count` tokens; the next ones are written over them."""
        self._stop = self._start + max(0, len(self) - count)
        self._counted()

    def keep_last(self, keep: int) -> None:
        """Forget all but the last `keep` tokens, and give room back that they will not need soon."""
        length = len(self)
        if length > keep:
            self._start += length - keep
        size = self.room.size(len(self) + 1)
        # not at once, so that drafts that come and go move nothing
        if 2 * (self._start + self.capacity) > 3 * size:
            self._move(self.views(), size)

    def select(self, rows: Tensor) -> None:
        """Make batch row `i` what row `rows[i]` was (`rows` `[new batch]`, integers or a boolean choice).

        With as many rows as before only those that change are copied.
        """
        rows = rows.to(self.device)
        if rows.dtype == torch.bool:
            rows = rows.nonzero().flatten()
        if len(rows) == self.batch and not torch.is_grad_enabled():
            moved = (rows != torch.arange(len(rows), dtype=rows.dtype, device=rows.device)).nonzero().flatten()
            if len(moved) == 0:
                return
            for view in self.views():
                view[moved] = view[rows[moved]]
        else:
            self._move([view[rows] for view in self.views()], self.capacity)
        self.per_sequence = {name: tensor[rows.to(tensor.device)] for name, tensor in self.per_sequence.items()}

    def to(self, device: torch.device | str) -> None:
        """Move everything to a device; spare room is not copied."""
        if torch.device(device) != self.device:
            self._move(self.views(), self.capacity, device)
        self.per_sequence = {name: tensor.to(device) for name, tensor in self.per_sequence.items()}

    def stay(self) -> None:
        """Tell compiled graphs which tensors of a fixed room stay where they are: else they copy them every time."""
        if self.count is not None and not torch.compiler.is_compiling():
            for tensor in (self.count, *self.rooms.values(), *self.per_sequence.values()):
                torch._dynamo.mark_static_address(tensor)
