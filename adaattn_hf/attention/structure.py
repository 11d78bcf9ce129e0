"""What one attention call asks for: which key each query may see, said in a few numbers.

A dense `[batch, 1, q_len, kv_len]` mask costs memory and time in proportion to its area; almost every mask in use is
one of a handful of shapes. `MaskStructure` holds the shape. `visible` turns it (or any band of its rows) into a boolean
tensor, which is the definition; `segments` turns it into contiguous runs that a kernel can walk, when that is possible.

Coordinates: key `j` has index `j`; query `i` stands at key index `i + q_offset`. A cache may have dropped a sequence's
first tokens: `dropped` says how many, so that its places and its sinks are counted from its first token all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from .segments import Segment, find_segments

__all__ = ["OPERANDS", "MaskStructure", "Segment"]

Made = TypeVar("Made")

OPERANDS = (
    "bool causal, SymInt q_offset, SymInt? window, SymInt sinks, SymInt? chunk, SymInt dropped, Tensor? offset, "
    "Tensor? dropped_by_row, Tensor? chunk_start, Tensor? key_padding, Tensor? q_segments, Tensor? k_segments, "
    "Tensor? spans, Tensor? mask"
)
"""What `MaskStructure.operands` returns, in the schema of an operator."""


@dataclass(eq=False)
class MaskStructure:
    """Visibility of keys, as a conjunction of simple rules. Never changed once made: what follows is remembered.

    Attributes:
        batch, q_len, kv_len: Extents of the call.
        causal: Key `j` is visible to a query at index `p` only if `j <= p`.
        q_offset: Key index of query 0; a 0-dim integer tensor for a preallocated cache (reading it may synchronise),
            whose queries stand among the keys.
        window: `W`: causal sees `p - W < j <= p`, bidirectional sees `|p - j| < W`.
        sinks: The first `sinks` keys of the sequence (after left padding, or of the document) are exempt from `window`.
        chunk: Only keys in the query's own chunk of this length are visible.
        chunk_start: `[batch]` key index at which chunk 0 starts; 0 when absent.
        key_padding: `[batch, kv_len]`, True for real tokens, the only ones seen. A query that is padding sees what a
            real one would in its place.
        q_segments, k_segments: `[batch or 1, q_len]` and `[batch or 1, kv_len]` document numbers, non-decreasing;
            a query sees its own document only.
        spans: `[batch, kv_len]`; tokens with the same number >= 0 see one another both ways (image tokens),
            whatever `causal` and `window` say.
        mask: Boolean, broadcastable to `[batch, heads, q_len, kv_len]`; a further condition.
        dropped: Tokens of each sequence before key 0, which a cache holds no longer; `[batch]` where rows differ.
        one_offset: Whether `q_offset` is that of every query.
        paged: Whether keys lie in pages (`pages.Pages`).
        made: What was derived from it, see `cached`; no copy has it.
    """

    batch: int
    q_len: int
    kv_len: int
    causal: bool = False
    q_offset: int | Tensor = 0
    window: int | None = None
    sinks: int = 0
    chunk: int | None = None
    chunk_start: Tensor | None = None
    key_padding: Tensor | None = None
    q_segments: Tensor | None = None
    k_segments: Tensor | None = None
    spans: Tensor | None = None
    mask: Tensor | None = None
    dropped: int | Tensor = 0
    one_offset: ClassVar[bool] = True
    paged: ClassVar[bool] = False
    made: dict[Any, Any] = field(default_factory=dict, repr=False)

    # ------------------------------------------------------------------ facts that need no data
    @property
    def plain(self) -> bool:
        """Nothing but `causal`, `window`, `sinks` and an integer offset says what is visible."""
        return (
            self.key_padding is None
            and self.k_segments is None
            and self.chunk is None
            and self.spans is None
            and self.mask is None
            and isinstance(self.q_offset, int)
        )

    @property
    def windowed(self) -> bool:
        """A window is set and shorter than what it would otherwise see."""
        if self.window is None:
            return False
        length = self.kv_len
        if isinstance(self.q_offset, int):
            if self.q_offset + self.q_len > length:
                length = self.q_offset + self.q_len
            elif self.q_offset < 0 and not self.causal:
                length -= self.q_offset  # from a query before the first key to the last one
        # towards later keys no sink is exempt from a window that looks both ways
        return self.window + (self.sinks if self.causal else 0) < length

    @property
    def shape(self) -> str:
        """Name of the shape: `full`, `causal`, `suffix`, `window`, `ragged` or `irregular`.

        `suffix` is causal with queries that stand after the first key (chunked prefill, one decode step); `ragged`
        needs data (padding, documents, a device-side offset) to become segments.
        """
        return self.cached(MaskStructure._shape)

    def _shape(self) -> str:
        if self.spans is not None or self.mask is not None:
            return "irregular"
        if not self.plain:
            return "ragged"
        if self.windowed:
            return "window"
        if not self.causal:
            return "full"
        return "causal" if self.q_offset == 0 and self.q_len == self.kv_len else "suffix"

    @property
    def one_run_a_row(self) -> bool:
        """Nothing but padding cuts a batch row: no chunks, documents, spans or dense mask."""
        return self.chunk is None and self.k_segments is None and self.spans is None and self.mask is None

    @property
    def sinks_at_runs(self) -> bool:
        """Sinks count from a sequence's first key, which a chunk or a document cut short by padding need not hold."""
        trimmed = self.k_segments is not None and self.key_padding is not None
        return self.chunk is None and not trimmed

    @property
    def query_positions(self) -> tuple[int, int] | None:
        """The first place of a query in its sequence, and the one after the last; None where tensors say it."""
        if not self.plain:
            return None
        least, most = self.cached(MaskStructure._dropped_range)
        return self.offset() + least, self.offset() + self.q_len + most

    @property
    def longest(self) -> int:
        """An upper bound of the tokens of any sequence, with those that a cache dropped; padding is not looked at."""
        dropped = self.dropped  # steps come here layer by layer
        return self.kv_len + (self.cached(MaskStructure._dropped_range)[1] if isinstance(dropped, Tensor) else dropped)

    def within(self, limit: int) -> bool | None:
        """Whether all rows stand before `limit` or in sequences up to it, or none do; None if rows or data differ."""
        if self.longest <= limit:
            return True
        positions = self.query_positions if self.causal else None
        if positions is None:
            return None
        first, last = positions
        return True if last <= limit else False if first >= limit else None

    def _dropped_range(self) -> tuple[int, int]:
        if not isinstance(self.dropped, Tensor):
            return self.dropped, self.dropped
        least, most = self.on_host(self.dropped).aminmax()
        return int(least), int(most)

    def mask_covers(self, heads: int) -> bool:
        """Whether the dense mask, if there is one, covers a call of so many heads: kernels read it by its strides."""
        if self.mask is None:
            return True
        extents, shape = (self.batch, heads, self.q_len, self.kv_len), self.mask.shape
        return len(shape) == 4 and all(n in (1, extent) for n, extent in zip(shape, extents, strict=True))

    def cached(self, make: Callable[..., Made], *arguments: Any) -> Made:
        """What `make(self, *arguments)` returns, made once and remembered as long as the structure lives."""
        key = (make, *arguments)
        if key not in self.made:
            self.made[key] = make(self, *arguments)
        made: Made = self.made[key]
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy or a pickle, which remembers nothing: what kernels are told are addresses of these very tensors."""
        return {**self.__dict__, "made": {}}

    def operands(self) -> tuple[Any, ...]:
        """The rules as arguments of an operator, as in `OPERANDS`: it takes no tensor where a number may stand."""
        (q_offset, offset), (dropped, by_row) = (
            (0, one) if isinstance(one, Tensor) else (one, None) for one in (self.q_offset, self.dropped)
        )
        return (
            self.causal, q_offset, self.window, self.sinks, self.chunk, dropped, offset, by_row, self.chunk_start,
            self.key_padding, self.q_segments, self.k_segments, self.spans, self.mask,
        )  # fmt: skip

    @classmethod
    def of_operands(cls, q: Tensor, k: Tensor, *operands: Any) -> MaskStructure:
        """The structure of queries and keys `[batch, heads, length, head_dim]`, from what `operands` returned."""
        causal, q_offset, window, sinks, chunk, dropped, offset, by_row, *tensors = operands
        chunk_start, key_padding, q_segments, k_segments, spans, mask = tensors
        return cls(
            q.shape[0], q.shape[2], k.shape[2], causal, q_offset if offset is None else offset, window, sinks, chunk,
            chunk_start, key_padding, q_segments, k_segments, spans, mask, dropped if by_row is None else by_row,
        )  # fmt: skip

    def with_changes(self, **changes: Any) -> MaskStructure:
        """A copy with other rules and nothing remembered."""
        return replace(self, **changes, made={})

    def expanded(self, batch: int) -> MaskStructure:
        """The structure of one batch row, repeated for `batch` rows."""
        if self.batch == batch:
            return self
        if self.batch != 1:
            raise ValueError(
                f"structure: made for a batch of {self.batch}, got queries of batch {batch}; "
                "pass an attention_mask whose batch is that of the inputs"
            )
        return self.cached(MaskStructure._expand, batch)

    def _expand(self, batch: int) -> MaskStructure:
        by_row = {name: getattr(self, name) for name in ("key_padding", "spans", "chunk_start", "dropped")}
        tensors = {name: t.expand(batch, *t.shape[1:]) for name, t in by_row.items() if isinstance(t, Tensor)}
        return self.with_changes(batch=batch, **tensors)

    # ------------------------------------------------------------------ the definition
    def visible(
        self, start: int = 0, stop: int | None = None, *, rows: Tensor | None = None, device: torch.device | str = "cpu"
    ) -> Tensor:
        """Boolean `[batch or 1, heads or 1, rows, kv_len]`: True where the query sees the key.

        This is the definition of every rule; it allocates no more than the rows asked for: those from `start` to before
        `stop`, or a few by their indices in `rows`.
        """
        keep: Tensor | None = None
        count = (self.q_len if stop is None else stop) - start if rows is None else len(rows)

        def of_rows(tensor: Tensor, dim: int) -> Tensor:
            if rows is None:
                return tensor.narrow(dim, start, count)
            return tensor.index_select(dim, rows.to(tensor.device))

        def both(a: Tensor | None, b: Tensor) -> Tensor:
            return b if a is None else a & b

        # small padded batches come here in every forward pass, so nothing is made that no rule asks for
        positional = self.causal or self.window is not None or self.chunk is not None or self.spans is not None
        if positional:
            p = (torch.arange(start, start + count, device=device) if rows is None else rows.to(device)) + self.q_offset
            j = torch.arange(self.kv_len, device=device)
            p_, j_ = p[None, None, :, None], j[None, None, None, :]
        if self.causal:
            keep = j_ <= p_
        if self.window is not None:
            near = (j_ > p_ - self.window) if self.causal else ((p_ - j_).abs() < self.window)
            if self.sinks:
                near = near | (j_ - self.first_token(device)[:, None, None, :] < self.sinks)
            keep = both(keep, near)
        if self.chunk is not None:
            if self.k_segments is not None:
                origin = self._sequence_start(device)
            elif self.chunk_start is not None:
                origin = self.chunk_start.to(device)[:, None].expand(-1, self.kv_len)
            else:
                origin = torch.zeros((1, self.kv_len), dtype=torch.long, device=device)
            at_p = origin.gather(1, p.clamp(0, self.kv_len - 1).expand(origin.shape[0], -1))
            chunk_of_q = (p - at_p).div(self.chunk, rounding_mode="floor")
            chunk_of_k = (j - origin).div(self.chunk, rounding_mode="floor")
            keep = both(keep, chunk_of_q[:, None, :, None] == chunk_of_k[:, None, None, :])
        if self.k_segments is not None:
            q_segments = self.q_segments if self.q_segments is not None else self.k_segments
            keep = both(
                keep,
                of_rows(q_segments, 1)[:, None, :, None].to(device) == self.k_segments[:, None, None, :].to(device),
            )
        if self.spans is not None:
            spans = self.spans.to(device)
            at_p = spans.gather(1, p.clamp(0, self.kv_len - 1).expand(spans.shape[0], -1))
            same = (at_p[:, None, :, None] == spans[:, None, None, :]) & (at_p >= 0)[:, None, :, None]
            keep = same if keep is None else keep | same
        if self.key_padding is not None:
            real = self.key_padding.to(device)
            keep = both(keep, real[:, None, None, :])
        if self.mask is not None:
            band = self.mask if self.mask.shape[-2] == 1 else of_rows(self.mask, -2)
            keep = both(keep, band.to(device))
        if keep is None:
            keep = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)
        return keep.expand(keep.shape[0], keep.shape[1], count, self.kv_len)

    def positions(self, device: torch.device | str) -> Tensor:
        """`[batch or 1, q_len]`: how many tokens of its sequence stand before each query, dropped ones counted."""
        place = torch.arange(self.q_len, device=device) + self.q_offset
        start = self.first_token(device)
        return place - start.gather(1, place.clamp(0, self.kv_len - 1)[None].expand(start.shape[0], -1))

    def first_token(self, device: torch.device | str) -> Tensor:
        """`[batch or 1, kv_len]`: the same of its first token, which is negative where a cache dropped that."""
        start, dropped = self._sequence_start(device), self.dropped
        first = -dropped.to(device)[:, None] if isinstance(dropped, Tensor) else -dropped
        return torch.where(start == 0, first, start)

    def _sequence_start(self, device: torch.device | str) -> Tensor:
        # `[batch or 1, kv_len]`: index of the first key of the sequence that each key belongs to
        j = torch.arange(self.kv_len, device=device)[None]
        if self.k_segments is not None:
            ids = self.k_segments.to(device)
            new = torch.ones_like(ids, dtype=torch.bool)
            new[:, 1:] = ids[:, 1:] != ids[:, :-1]
            return torch.where(new, j, torch.zeros_like(j)).cummax(dim=1).values
        if self.key_padding is not None:
            return self.key_padding.to(device).int().argmax(dim=1, keepdim=True).expand(-1, self.kv_len)
        return torch.zeros_like(j)

    # ------------------------------------------------------------------ facts that need data
    def simplified(self) -> MaskStructure:
        """The same visibility in the fewest rules: padding that hides nothing is dropped, a device-side offset is read.

        Looks at the data once, then remembers. Must not be called while a graph is traced or captured.
        """
        if self.key_padding is None and isinstance(self.q_offset, int):
            return self
        return self.cached(MaskStructure._settle) or self

    def _settle(self) -> MaskStructure | None:
        # None for itself: one that remembers itself would wait for the garbage collector, with all its tables
        changes: dict[str, Any] = {}
        padding = self.padding_on_host()
        if padding is not None and not padding.is_meta and bool(padding.all()):
            changes = {"key_padding": None}
        if not isinstance(self.q_offset, int):
            changes["q_offset"] = self.offset()
        if not changes:
            return None
        fetched = {key: made for key, made in self.made.items() if key == (MaskStructure._fetch,)}
        return replace(self, **changes, made=fetched)

    def padding_on_host(self) -> Tensor | None:
        """`key_padding` in the host's memory."""
        return None if self.key_padding is None else self.on_host(self.key_padding)

    def on_host(self, tensor: Tensor) -> Tensor:
        """A tensor of the rules in the host's memory: on CUDA one synchronisation for all that runs are made of."""
        return tensor if tensor.is_cpu or tensor.is_meta else self.cached(MaskStructure._fetch)[id(tensor)]

    def _fetch(self) -> dict[int, Tensor]:
        rules = (self.q_offset, self.chunk_start, self.key_padding, self.q_segments, self.k_segments, self.dropped)
        tensors = {id(t): t for t in rules if isinstance(t, Tensor)}
        on_host = {key: t.to("cpu", non_blocking=t.is_cuda) for key, t in tensors.items()}
        for device in {t.device for t in tensors.values() if t.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return on_host

    def segments(self) -> tuple[Segment, ...] | None:
        """The call as contiguous runs, or None if it is not made of such: spans, a dense mask, holes, sinks elsewhere.

        Reads the padding, the document numbers and a device-side offset once, then remembers: on CUDA this is the one
        synchronisation of a forward pass. Must not be called while a graph is traced or captured.
        """
        if self.spans is not None or self.mask is not None or (self.sinks and not self.sinks_at_runs):
            return None
        return self.cached(find_segments)

    def offset(self) -> int:
        """`q_offset` as an integer (reads it from the device once)."""
        return self.q_offset if isinstance(self.q_offset, int) else self.cached(MaskStructure._read_offset)

    def _read_offset(self) -> int:
        return int(self.on_host(self.q_offset) if isinstance(self.q_offset, Tensor) else self.q_offset)
