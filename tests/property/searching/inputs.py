"""What a model is called with, drawn: positions that mean documents or anything else, masks of every form, caches."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.support.calls import generator
from tests.support.malformed import Shown
from tests.support.models import VOCABULARY

MOST_TOKENS = 24
POSITIONS = (
    "counted", "skipped", "stepped", "repeated", "halves", "fractional", "restarting", "constant", "backwards"
)  # fmt: skip
MASKS = ("none", "none", "ones", "left", "right", "holes", "boolean", "additive")
CACHES = ("off", "off", "default", "made", "dynamic", "static", "ours", "int8")


@dataclass(frozen=True, repr=False)
class Inputs(Shown):
    """One sequence of calls."""

    ids: Tensor  # [rows, length]
    positions: Tensor | None  # [rows or 1, length]
    mask: Tensor | None  # [rows, length]; boolean or additive [rows, 1, length, length]
    borders: Tensor | None  # [documents + 1] cumulative lengths that are handed over as cu_seq_lens_*
    pieces: tuple[int, ...]  # lengths of the calls, each behind the cache of those before it
    cache: str  # one of CACHES
    words: dict[str, Any] = field(default_factory=dict)  # what was drawn, for people
    keep: int | Tensor | None = None  # logits_to_keep of each call: a number of last rows (0 for all), or indices

    def __repr__(self) -> str:
        return f"{self.words}"

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
        ways: dict[str, Callable[[], Tensor]] = {
            "skipped": lambda: counted + behind * draw(st.sampled_from([1, 2, 15, 40])),
            "stepped": lambda: counted * draw(st.sampled_from([2, 3])),
            "repeated": lambda: counted - behind if cut else counted, "halves": lambda: counted // 2,
            "fractional": lambda: counted * draw(st.sampled_from([0.5, 0.25, 1.5])),
            "restarting": lambda: torch.arange(length) - cut * behind, "constant": lambda: torch.full((length,), start),
            "backwards": lambda: counted.flip(0),
        }  # fmt: skip
        return ways.get(kind, lambda: counted)()

    return torch.stack([row() for _ in range(rows)]) if draw(st.booleans()) else row().expand(rows, -1).contiguous()


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
    return torch.zeros(seen.shape, dtype=torch.float32).masked_fill(~seen, torch.finfo(torch.float32).min)


@st.composite
def packed(draw: st.DrawFn, length: int) -> tuple[Tensor, Tensor | None]:
    """Cumulative lengths of documents in one row, and their positions, where these are handed over as well."""
    starts = sorted({0, *(draw(st.integers(0, length - 1)) for _ in range(2))})
    borders = torch.tensor([*starts, length], dtype=torch.int32)
    positions = torch.cat([torch.arange(int(count)) for count in borders.diff()])[None]
    return borders, positions if draw(st.booleans()) else None


@st.composite
def inputs(draw: st.DrawFn, decodes: bool, packs: bool, flat: bool, graph: bool) -> Inputs:
    """Calls of a model that `decodes` over a cache, `packs` documents that lengths tell, takes `flat` masks alone; or
    calls that a `graph` is made of: one call, no cache but one that the model makes."""
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
