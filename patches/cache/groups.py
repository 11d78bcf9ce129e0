"""Key/value heads of a layer that keep the same tokens: all, or the first ones of each sequence (sinks) and a window.

A token at position `p` lies at slot `p` until `sinks + window` slots are taken, then at `sinks + (p - sinks) % window`.
Rotary embeddings are applied before keys are stored, so the order of slots does not matter. If a row begins with
padding, its sinks are copied to slots `p % sinks` before the ring overwrites them.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from adaattn_hf.attention.structure import MaskStructure

from .formats import Format, Read
from .store import Room, Store

Span = tuple[int, int]
"""Window and sinks of a key/value head: it reads the last `window` tokens and the first `sinks`."""
Spans = tuple[Span | None, ...]
"""Of each key/value head of a layer, None where it keeps everything."""


class HeadGroup:
    """The tokens of some key/value heads, of which those with a span keep `sinks + window` slots."""

    def __init__(self, heads: Sequence[int], span: Span | None, fmt: Format, store: Store) -> None:
        """Of heads whose tokens are in a store; a ring has room for `sinks + window` of them (`room_of`)."""
        self.heads, self.span, self.format, self.store = tuple(heads), span, fmt, store
        self._count: int | None = 0
        self.before: tuple[Store, int] | None = None
        self.since: list[tuple[Tensor, Tensor, Sequence[int]]] = []
        """What was held at the last `commit` while the past is recorded, and what came since."""

    @property
    def count(self) -> int:
        """Tokens that came, those that are gone counted; behind a captured step the device has to be asked."""
        if self._count is None:
            held, came = len(self.store), self.store.count  # both ask now: what the device counts may be changed next
            self._count = held if came is None or self.store.room.ring is None else int(came)
        return self._count

    @count.setter
    def count(self, count: int) -> None:
        """Tell the device, too, where it counts what comes to a ring; other stores tell what they hold."""
        self._count = count
        if self.store.count is not None and self.store.room.ring is not None:
            self.store.count.fill_(count)

    @property
    def whole(self) -> bool:
        """Nothing is gone."""
        return self.span is None or self.count <= sum(self.span)

    def append(self, keys: Tensor, values: Tensor, starts: Sequence[int], record_past: bool = False) -> Read:
        """Write `[batch, heads, n, head_dim]`; returns keys, values and record as the call of these tokens reads them.

        One token reads all slots as they lie; more read the sinks, the ring from its oldest token on, and themselves.
        """
        if self.span is not None and record_past:
            if self.before is None:
                self.before = copy.deepcopy(self.store), self.count
            self.since.append((keys, values, starts))
        else:
            self.commit()
        store, fmt, count, past = self.store, self.format, keys.shape[2], self.count
        self.count += count
        if self.span is None or self.whole:
            fmt.append(store, keys, values)
            return fmt.read(store, store.views())
        window, sinks = self.span
        fmt.begin(store, keys, values)
        if count == 1:
            views = store.extend(sinks + window - len(store))
            at = sinks + (past - sinks) % window
            self._save(views, range(past - window, past - window + 1), past - window - at, starts)
            fmt.write(store, keys, values, views, at)
            return fmt.read(store, views, first=sinks > 0)
        views, oldest = store.views(), max(sinks, past - window)
        device = views[0].device
        ring = torch.arange(oldest, max(oldest, past), device=device)
        # the slots of the sinks, and of the ring from its oldest token on
        slots = torch.cat([torch.arange(min(past, sinks), device=device), sinks + (ring - sinks) % window])
        past_line = [view[:, :, slots] for view in views]
        new = [part.new_empty((*part.shape[:2], count, *part.shape[3:])) for part in past_line]
        fmt.write(store, keys, values, new)
        line = [torch.cat(pair, dim=2) for pair in zip(past_line, new, strict=True)]
        views = store.extend(sinks + window - len(store))
        places = slots_after(self.count, window, sinks, device)
        places[sinks:] -= oldest - sinks
        for view, whole in zip(views, line, strict=True):
            view.copy_(whole[:, :, places])
        # read before the sinks of rows behind padding are saved, which are not in their slots here
        read = fmt.read(store, line, first=sinks > 0 or oldest == 0)
        self._save(views, range(oldest, self.count - window), oldest - sinks, starts, line)
        return read

    def step(self, keys: Tensor, values: Tensor) -> Read:
        """`append` of one token `[batch, heads, 1, head_dim]` to a fixed room in a graph, where the device counts."""
        self.format.append(self.store, keys, values)
        self._count = None
        first = self.store.room.ring is None or self.store.room.ring[0] > 0
        return self.format.read(self.store, list(self.store.rooms.values()), first)

    def _save(
        self, views: list[Tensor], gone: range, shift: int, starts: Sequence[int], source: list[Tensor] | None = None
    ) -> None:
        """Copy the tokens at positions `gone`, at `position - shift` of the source, that are sinks of their row."""
        assert self.span is not None
        sinks = self.span[1]
        if sinks == 0:
            self.format.renew_first(self.store, [], [])
        moves = [
            (row, position)
            for row, start in enumerate(starts)
            if start
            for position in range(max(start, gone.start), min(start + sinks, gone.stop))
        ]
        if not moves:
            return
        rows, places = torch.tensor(moves, dtype=torch.int64, device=views[0].device).unbind(1)
        tokens = [part[rows, :, places - shift] for part in source or views]
        for view, part in zip(views, tokens, strict=True):
            view[rows, :, places % sinks] = part
        head = (places % sinks == 0).nonzero().flatten()
        self.format.renew_first(self.store, rows[head].tolist(), [part[head] for part in tokens])

    def can_crop(self, count: int) -> bool:
        """Whether what the heads read without the last `count` tokens is there, or recorded."""
        return not count or self.whole or (self.before is not None and self.before[1] <= self.count - count)

    def crop(self, count: int) -> None:
        """Forget the last `count` tokens, see `can_crop`, and what was recorded."""
        left, since = self.count - count, self.since
        if self.whole or not count or self.before is None:
            self.store.crop(count)
            self.count = left
        else:
            self.store, self.count = self.before
            for keys, values, starts in since:
                fits = min(keys.shape[2], left - self.count)
                if fits > 0:
                    self.append(keys[:, :, :fits], values[:, :, :fits], starts)
        self.commit()

    def commit(self) -> None:
        """Let what is held be what `crop` goes back to."""
        self.before, self.since = None, []


def room_of(span: Span | None, room: Room) -> Room:
    """How much of a layer's room heads with a span need."""
    if span is None or (room.limit is not None and room.limit <= sum(span)):
        return room
    ring = (span[1], room.limit) if room.fixed and room.limit is not None else None
    return Room(min(room.reserve, sum(span)), room.growth, sum(span), room.fixed, ring)


# ---------------- positions and slots; what is of a structure is kept there, by `MaskStructure.cached`
def slots_after(total: int | Tensor, window: int, sinks: int, device: torch.device | str) -> Tensor:
    """Position of the token in each slot after `total` tokens, where so many came; in sinks of rows without padding."""
    slots = torch.arange(sinks + window, device=device)
    return torch.where(slots < sinks, slots, slots + (total - 1 - slots).div(window, rounding_mode="floor") * window)


def starts_of(structure: MaskStructure) -> tuple[int, ...]:
    """Position of the first real token of each row, `kv_len` where there is none yet."""
    real = structure.padding_on_host()
    if real is None:
        return (0,) * structure.batch
    first = torch.where(real.any(1), real.int().argmax(1), structure.kv_len)
    return tuple(first.expand(structure.batch).tolist())


def structure_of(structure: MaskStructure, window: int, sinks: int) -> MaskStructure:
    """What a call sees of the keys that `HeadGroup.append` hands to it: those of a full cache in the window."""
    batch, count, total = structure.batch, structure.q_len, structure.kv_len
    past = total - count
    if total <= sinks + window:
        return structure.with_changes(window=window, sinks=sinks) if count > 1 else structure
    # positions of the keys that are handed over, in their order
    if count == 1:
        oldest, positions = total - window, slots_after(total, window, sinks, "cpu")
    else:
        oldest = max(sinks, past - window)
        positions = torch.cat([torch.arange(sinks, device="cpu"), torch.arange(oldest, total, device="cpu")])
    plain = MaskStructure(batch, count, len(positions), causal=True, q_offset=len(positions) - count)
    if count > 1:
        plain = plain.with_changes(window=window, sinks=sinks)
    real = structure.padding_on_host()
    if real is None or structure.key_padding is None:
        return plain
    start = torch.tensor(structure.cached(starts_of), dtype=torch.int64, device="cpu")[:, None]
    at = positions[None].expand(batch, -1)
    if sinks:
        sink = start + (positions - start) % sinks
        at = torch.where(positions < sinks, torch.where(sink < oldest, sink, -1), at)
    rows = torch.arange(past, total, device="cpu")[None, :, None]
    there = (at >= 0) & real.expand(batch, -1).gather(1, at.clamp(0, total - 1))
    if bool(there.all()):
        return plain
    near = (at[:, None] > rows - window) | (at - start < sinks)[:, None]
    seen = there[:, None] & (at[:, None] <= rows) & near
    return MaskStructure(batch, count, len(positions), mask=seen[:, None].to(structure.key_padding.device))


def slots_seen(structure: MaskStructure, slots: int, sinks: int) -> MaskStructure:
    """What the newest token sees of a ring's slots as they lie, where only the device knows how many tokens came.

    `structure` is that of a fixed room. Sinks of rows behind padding lie where `HeadGroup.append` saves them.
    """
    total, padding, window = structure.q_offset + 1, structure.key_padding, slots - sinks
    if padding is None and structure.mask is None:
        filled = total.clamp(max=slots) if isinstance(total, Tensor) else min(total, slots)
        return MaskStructure(structure.batch, 1, slots, causal=True, q_offset=filled - 1)
    assert padding is not None  # a plan keeps it beside a dense mask
    slot = torch.arange(slots, device=padding.device)
    at = slots_after(total, window, sinks, padding.device)[None]
    if sinks:
        start = padding.int().argmax(1)[:, None]
        sink = start + (slot - start) % sinks
        at = torch.where((slot < sinks) & (total > slots), torch.where(sink < total - window, sink, -1), at)
    there = (slot < total) & (at >= 0) & padding.gather(1, at.clamp(min=0).expand(structure.batch, -1))
    if structure.mask is None:
        return MaskStructure(structure.batch, 1, slots, key_padding=there)
    return MaskStructure(structure.batch, 1, slots, mask=there[:, None, None])
