"""Storage for the keys and values of some heads: numbers in the model's dtype, or codes with scales."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from adaattn_hf.attention.stored import StoredKV, direction_of, hadamard

from .carrier import StoredTensor
from .growing import GROWTH, GrowingTensor
from .rounding import append, write

SMOOTHED = 16
"""Tokens after which the mean of a sequence's keys is computed and subtracted before quantisation."""
PROMPT = "_adaattn_prompt"
"""Attribute of a prompt's keys on their way to attention: the `Tokens` that they were rounded into."""

_CODES: dict[str, tuple[torch.dtype | None, str]] = {
    "key_codes": (torch.int8, "k"),
    "key_scale": (torch.uint8, ""),
    "value_codes": (torch.int8, "v"),
    "value_scale": (torch.uint8, ""),
}
PARTS: dict[str, dict[str, tuple[torch.dtype | None, str]]] = {
    "model": {"keys": (None, "k"), "values": (None, "v")},
    "int8": _CODES,
    "k8v4": {**_CODES, "value_codes": (torch.uint8, "w")},
}
"""Per format the tensors that grow with the tokens: dtype, None for the model's, and the extent of a token, if any:
`k` channels of a key, `v` of a value, `w` half of these."""
CACHES = tuple(PARTS)
"""What a cache can keep: numbers in the model's dtype, or one of the quantised formats."""
BESIDE = ("mean", "first", "along")
"""Tensors of a sequence as a whole, fp32 `[batch, num_kv_heads, head_dim]`: the mean of the rotated keys, the first
key, and the direction along which the errors of keys cancel."""


def widths(head_dim: int, head_dim_v: int) -> dict[str, int]:
    """The extents that `PARTS` names, of keys and values of so many channels."""
    return {"k": head_dim, "v": head_dim_v, "w": head_dim_v // 2}


def numbers_like(held: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values of no tokens, as those that `Tokens.held` gave; of `dtype` where they are codes."""
    if "keys" in held:
        return held["keys"][:, :, :0], held["values"][:, :, :0]
    keys, values = held["key_codes"][:, :, :0], held["value_codes"][:, :, :0]
    channels = values.shape[3] * (2 if values.dtype is torch.uint8 else 1)
    return keys.to(dtype), values.new_empty((*values.shape[:3], channels), dtype=dtype)


class Tokens:
    """Keys and values `[batch, num_kv_heads, length, head_dim]` in one format that grow in place.

    Attributes:
        stored: The format, one of `CACHES`.
        parts: Its tensors, in the order of `PARTS`.
        mean, first, along: See `BESIDE`; None where there is none yet, and of numbers.
        count: The number of tokens as a tensor, where codes of all that there will be have their room from the start:
            then a graph that is captured can write and read them. None where tokens grow.
    """

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        stored: str,
        reserve: int = 0,
        growth: float = GROWTH,
        most: int | None = None,
        fixed: bool = False,
    ) -> None:
        """Empty, for tokens shaped like these `[batch, num_kv_heads, any, head_dim]`; room as in `GrowingTensor`."""
        self.stored, self.dtype, self.dim_v = stored, keys.dtype, values.shape[3]
        sizes, own = widths(keys.shape[3], values.shape[3]), {"k": keys.dtype, "v": values.dtype}
        self.count: Tensor | None = None
        self._known: int | None = 0
        # a fixed room that was made in inference mode could not be written to outside of it
        with torch.inference_mode(torch.is_inference_mode_enabled() and not fixed):
            self.parts = tuple(
                GrowingTensor(
                    torch.empty(
                        (*keys.shape[:2], 0, *(sizes[letter] for letter in extent)),
                        dtype=dtype or own[extent],
                        device=keys.device,
                    ),
                    reserve=reserve,
                    growth=growth,
                    most=most,
                )
                for dtype, extent in PARTS[stored].values()
            )
            if fixed:
                self.count = torch.zeros((), dtype=torch.int64, device=keys.device)
        self.mean: Tensor | None = None
        self.first: Tensor | None = None
        self.along: Tensor | None = None
        if fixed:
            for part in self.parts:
                part.extend(reserve)
            self._stay()

    def _stay(self) -> None:
        """Tell compiled graphs which tensors stay where they are: else they copy them before every replay."""
        if self.count is not None and not torch.compiler.is_compiling():
            beside = (self.mean, self.first, self.along)
            for tensor in (self.count, *(part.room for part in self.parts), *beside):
                if tensor is not None:
                    torch._dynamo.mark_static_address(tensor)

    def __len__(self) -> int:
        """Tokens held; behind a compiled step the host has to ask the device."""
        if self.count is None:
            return len(self.parts[0])
        if self._known is None:
            self._known = int(self.count)
        return self._known

    # ---------------- writing
    def append(self, keys: Tensor, values: Tensor) -> list[Tensor]:
        """Write `[batch, num_kv_heads, n, head_dim]` behind what is there; returns `whole`."""
        if self.count is not None and torch.compiler.is_compiling():
            parts = self.whole()
            append(keys, values, *parts, self.mean, self.along, self.count)  # the host counts nothing here
            self._known = None
            return parts
        past, count = len(self), keys.shape[2]
        self.begin(keys, values)
        views = self.whole() if self.count is not None else [part.extend(count) for part in self.parts]
        if count:
            self.write(keys, values, views, past)
        if self.count is not None:
            self._hold(past + count)
        return views

    def _hold(self, length: int) -> None:
        assert self.count is not None
        self._known = length
        self.count.fill_(length)

    def begin(self, keys: Tensor, values: Tensor) -> None:
        """Prepare for these tokens, which are written next: the first key and the mean of a sequence, and dtypes."""
        length, count = len(self), keys.shape[2]
        if self.stored == "model":
            self.parts[0].widen(keys.dtype)
            self.parts[1].widen(values.dtype)
        elif count and not length:
            # copied, since a view would keep the whole prompt
            self.first = keys[:, :, 0].to(torch.float32, copy=True, memory_format=torch.contiguous_format)
            # where nothing may move later, few keys tell the mean as well as they can: any vector may be taken off
            enough = self.count is not None or count >= SMOOTHED
            self.mean = _mean_of(keys.float()) if enough else None
            self._stay()
        elif count and self.mean is None and length + count >= SMOOTHED:
            self._smooth(keys)

    def write(self, keys: Tensor, values: Tensor, parts: Sequence[Tensor], at: int = 0) -> None:
        """Write tokens into parts `[batch, num_kv_heads, length, …]` from place `at` on."""
        if self.stored == "model":
            for part, new in zip(parts, (keys, values), strict=True):
                part.narrow(2, at, new.shape[2]).copy_(new)
        else:
            write(keys, values, parts, mean=self.mean, along=self.along, at=at)

    def _smooth(self, more: Tensor) -> None:
        for part in self.parts:
            part.renew()
        views = self.views()
        there = self._record(views).keys(views[0], torch.float32)
        self.mean = _mean_of(torch.cat([there, more.float()], dim=2))
        write(there, None, views, mean=self.mean, along=self.along)

    def expect(self, queries: Tensor) -> None:
        """From now on round keys such that their errors cancel along the mean of a prompt's queries."""
        if self.stored != "model":
            few = queries.shape[2] < SMOOTHED
            room = self.parts[0].room
            self.along = None if few else direction_of(queries, room.shape[1]).to(room.device)
            self._stay()

    def reread(self, queries: Tensor, keys: Tensor) -> None:
        """Round the keys of a prompt, the only tokens held, again, now that its queries are known."""
        self.expect(queries)
        if self.along is not None:
            views = self.views()
            # a cache that offloads has moved its own by now
            keys = keys[:, :, -len(self) :].to(views[0].device)
            write(keys, None, views, mean=self.mean, along=self.along)

    def renew_first(self, rows: Sequence[int], parts: Sequence[Tensor]) -> None:
        """Replace the first key of sequences `rows` by parts `[rows, num_kv_heads, …]`; without parts drop all."""
        if not parts:
            self.first = None
        elif self.first is not None and rows:
            mean = None if self.mean is None else self.mean[list(rows)]
            record = StoredKV(parts[1][..., None], parts[3][..., None], mean)
            self.first = self.first.index_put(
                (torch.tensor(rows, dtype=torch.int64, device=self.first.device),),
                record.keys(parts[0][:, :, None], torch.float32)[:, :, 0],
            )

    # ---------------- reading
    def whole(self) -> list[Tensor]:
        """The parts of all tokens held; where these are counted by a tensor, of all that there is room for."""
        return self.views() if self.count is None else [part.room for part in self.parts]

    def views(self, last: int | None = None) -> list[Tensor]:
        """The parts of all tokens held, which share the storage, or of the `last` ones where tokens grow."""
        if self.count is not None:
            return [part.room[:, :, : len(self)] for part in self.parts]
        return [part.view(last) for part in self.parts]

    def read(self, parts: Sequence[Tensor], first: bool = True) -> tuple[Tensor, Tensor, StoredKV | None]:
        """Keys, values and what turns them into numbers; `first`: the sequence's first key is the first of them."""
        if self.stored == "model":
            return parts[0], parts[1], None
        return parts[0], parts[2], self._record(parts, first)

    def _record(self, parts: Sequence[Tensor], first: bool = True) -> StoredKV:
        return StoredKV(parts[1], parts[3], self.mean, self.first if first else None)

    def shown(
        self, parts: Sequence[Tensor] | None = None, last: int | None = None
    ) -> tuple[Tensor, Tensor] | tuple[StoredTensor, StoredTensor]:
        """Keys and values as attention is handed them: tensors, or what carries codes."""
        first = last is None or last >= len(self)
        key, value, record = self.read(self.views(last) if parts is None else parts, first)
        if record is None:
            return key, value
        return (
            StoredTensor(key, record, key.shape[3], self.dtype),
            StoredTensor(value, record, self.dim_v, self.dtype),
        )

    def held(self) -> dict[str, Tensor]:
        """All tensors of the storage, by name; `take` puts them into empty storage."""
        beside = {name: getattr(self, name) for name in BESIDE}
        parts = dict(zip(PARTS[self.stored], self.views(), strict=True))
        return parts | {name: tensor for name, tensor in beside.items() if tensor is not None}

    def take(self, held: Mapping[str, Tensor]) -> None:
        """Fill this empty storage with what `held` gave."""
        given = [held[name] for name in PARTS[self.stored]]
        if self.count is None:
            for part, tensor in zip(self.parts, given, strict=True):
                part.append(tensor)
        else:
            length = given[0].shape[2]
            for room, tensor in zip(self.whole(), given, strict=True):
                room[:, :, :length].copy_(tensor)
            self._hold(length)
        self.mean, self.first, self.along = (held.get(name) for name in BESIDE)
        self._stay()

    # ---------------- changing
    def crop(self, count: int) -> None:
        """Forget the last `count` tokens."""
        if self.count is not None:
            self._hold(max(0, len(self) - count))
            return
        for part in self.parts:
            part.crop(count)

    def keep_last(self, keep: int) -> None:
        """Forget all but the last `keep` tokens, and give back room that a long prompt took."""
        if len(self) > keep:
            self.first = None
        for part in self.parts:
            part.keep_last(keep)

    def select(self, rows: Tensor) -> None:
        """Make batch row `i` what row `rows[i]` was."""
        self._change(lambda part: part.select(rows), lambda beside: beside[rows.to(beside.device)])

    def repeat(self, times: int) -> None:
        """Repeat each batch row."""
        self._change(lambda part: part.repeat(times), lambda beside: beside.repeat_interleave(times, dim=0))

    def to(self, device: torch.device | str) -> None:
        """Move everything to a device."""
        self._change(lambda part: part.to(device), lambda beside: beside.to(device))

    def _change(self, part: Callable[[GrowingTensor], None], beside: Callable[[Tensor], Tensor]) -> None:
        for one in self.parts:
            part(one)
        for name in BESIDE:
            there = getattr(self, name)
            setattr(self, name, None if there is None else beside(there))
        self._stay()


def _mean_of(keys: Tensor) -> Tensor:
    return (keys.mean(dim=2) @ hadamard(keys.shape[3], keys.device)).contiguous()
