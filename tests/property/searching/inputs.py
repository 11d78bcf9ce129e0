"""What a model is called with, drawn: positions that mean documents or anything else, masks of every form, caches."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.support.models import VOCABULARY
from tests.support.requests import generator

MOST_TOKENS = 24
POSITIONS = (
    "counted", "skipped", "stepped", "repeated", "halves", "fractional", "restarting", "constant", "backwards"
)  # fmt: skip
MASKS = ("none", "none", "ones", "left", "right", "holes", "boolean", "additive")
CACHES = ("off", "off", "default", "made", "dynamic", "static", "ours", "int8")


@dataclass(frozen=True)
class Inputs:
    """One sequence of calls.

    Attributes:
        ids: `[rows, length]`.
        positions: `[rows or 1, length]`, or None.
        mask: `[rows, length]`; boolean or additive `[rows, 1, length, length]`; or None.
        borders: `[documents + 1]` cumulative lengths that are handed over as `cu_seq_lens_*`, or None.
        pieces: Lengths of the calls, each behind the cache of those before it.
        cache: One of `CACHES`.
        words: What was drawn, for people.
        keep: `logits_to_keep` of each call: a number of last rows (0 for all), their indices, or None.
    """

    ids: Tensor
    positions: Tensor | None
    mask: Tensor | None
    borders: Tensor | None
    pieces: tuple[int, ...]
    cache: str
    words: dict[str, Any] = field(default_factory=dict)
    keep: int | Tensor | None = None

    @property
    def kept(self) -> Tensor:
        """The columns whose logits the calls give, one after the other."""
        parts, start = [], 0
        for piece in self.pieces:
            columns = torch.arange(start, start + piece)
            parts.append(columns[self.keep] if isinstance(self.keep, Tensor) else columns[-(self.keep or 0) :])
            start += piece
        return torch.cat(parts)

    @property
    def real(self) -> Tensor:
        """`[rows, length]`: tokens that are not padding."""
        if self.mask is not None and self.mask.dim() == 2:
            return self.mask.bool()
        return torch.ones_like(self.ids, dtype=torch.bool)


@st.composite
def position_rows(draw: st.DrawFn, rows: int, length: int, kind: str) -> Tensor:
    def row() -> Tensor:
        start = draw(st.sampled_from([0, 0, 3]))
        counted, cut = torch.arange(length) + start, draw(st.integers(0, length))
        behind = (torch.arange(length) >= cut).long()
        if kind == "skipped":
            return counted + behind * draw(st.sampled_from([1, 2, 15, 40]))
        if kind == "stepped":
            return counted * draw(st.sampled_from([2, 3]))
        if kind == "repeated":
            return counted - behind if cut else counted
        if kind == "halves":
            return counted // 2
        if kind == "fractional":
            return counted * draw(st.sampled_from([0.5, 0.25, 1.5]))
        if kind == "restarting":
            return torch.where(behind.bool(), torch.arange(length) - cut, torch.arange(length))
        if kind == "constant":
            return torch.full((length,), start)
        if kind == "backwards":
            return counted.flip(0)
        return counted

    if draw(st.booleans()):
        return torch.stack([row() for _ in range(rows)])
    return row().expand(rows, -1).contiguous()


@st.composite
def masks(draw: st.DrawFn, rows: int, length: int, kind: str, causal: bool) -> Tensor | None:
    """A mask of one kind; those of four dimensions hold causality themselves, and let each query see its own key."""
    if kind == "none":
        return None
    random = generator(draw(st.integers(0, 999)))
    if kind in ("boolean", "additive"):
        seen = torch.rand(rows, 1, length, length, generator=random) > draw(st.sampled_from([0.0, 0.4]))
        seen = (seen.tril() if causal else seen) | torch.eye(length, dtype=torch.bool)
        return seen if kind == "boolean" else additive(seen)
    mask = torch.ones(rows, length, dtype=torch.long)
    if kind == "holes":
        mask = (torch.rand(rows, length, generator=random) > 0.3).long()
        mask[:, 0] = 1
    elif kind in ("left", "right"):
        for index in range(rows):
            count = draw(st.integers(0, length - 1))
            hidden = slice(0, count) if kind == "left" else slice(length - count, length)
            mask[index, hidden] = 0
    return mask


def additive(seen: Tensor) -> Tensor:
    zeros = torch.zeros(seen.shape, dtype=torch.float32)
    return zeros.masked_fill(~seen, torch.finfo(torch.float32).min)


@st.composite
def packed(draw: st.DrawFn, length: int) -> tuple[Tensor, Tensor | None]:
    """Cumulative lengths of documents in one row, and their positions, where these are handed over as well."""
    starts = sorted({0, *(draw(st.integers(0, length - 1)) for _ in range(2))})
    borders = torch.tensor([*starts, length], dtype=torch.int32)
    positions = torch.cat([torch.arange(int(count)) for count in borders.diff()])[None]
    return borders, positions if draw(st.booleans()) else None


@st.composite
def inputs(draw: st.DrawFn, decodes: bool, packs: bool, flat: bool, graph: bool) -> Inputs:
    """Calls of a model.

    Args:
        decodes: Whether the model is causal and keeps a cache.
        packs: Whether documents that are told by `cu_seq_lens_*` can be kept apart.
        flat: Whether its masks have two dimensions alone.
        graph: Whether a graph is made of them: one call, no cache but one that the model makes.
    """
    rows, length = draw(st.sampled_from([1, 1, 2, 3])), draw(st.sampled_from([1, 2, 5, 8, 11, MOST_TOKENS]))
    place = draw(st.sampled_from(("none", "none", "restarting", "restarting", *POSITIONS)))
    kind = draw(st.sampled_from(MASKS[:6] if flat else MASKS))
    cache = draw(st.sampled_from(CACHES[:3] if graph else CACHES)) if decodes else "none"
    if packs and draw(st.integers(0, 7)) == 0:
        rows, place, kind, cache = 1, "packed", draw(st.sampled_from(["none", "ones"])), "off"
    if cache == "static" and kind in ("boolean", "additive"):
        kind = "none"  # such a mask would have to know how long the cache is
    pieces: tuple[int, ...] = (length,)
    if cache in CACHES[3:] and length > 1:
        cut = draw(st.integers(1, length - 1))
        pieces = (cut, *[1] * (length - cut)) if draw(st.booleans()) else (cut, length - cut)
    borders = positions = None
    if place == "packed":
        borders, positions = draw(packed(length))
    elif place != "none":
        positions = draw(position_rows(draw(st.sampled_from([rows, rows, 1])), length, place))
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator(draw(st.integers(0, 999))))
    words = {"positions": place, "mask": kind, "cache": cache, "pieces": pieces, "rows": rows}
    return Inputs(ids, positions, draw(masks(rows, length, kind, decodes)), borders, pieces, cache, words)


@st.composite
def kept(draw: st.DrawFn, given: Inputs) -> Inputs:
    """The same calls, of which some rows of logits are asked for."""
    fewest = min(given.pieces)
    some = torch.arange(fewest)[torch.rand(fewest, generator=generator(draw(st.integers(0, 999)))) > 0.5]
    keep = draw(st.sampled_from([0, 1, 1, 3, fewest, some if len(some) else torch.tensor([fewest - 1])]))
    shown = keep.tolist() if isinstance(keep, Tensor) else keep
    return replace(given, keep=keep, words=given.words | {"keep": shown})
