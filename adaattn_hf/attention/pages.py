"""One query per sequence over keys that lie in pages of a common cache, as engines for many requests keep them."""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from .structure import MaskStructure


@dataclass(eq=False, kw_only=True)
class Pages(MaskStructure):
    """Each query stands at the last key of its sequence; the keys of a call are one row of all pages.

    `window` and `sinks` count from a sequence's own keys. A sequence without keys sees nothing.

    Attributes:
        table: `[batch, most pages of a sequence]`, the numbers of its pages in order; what follows them is not read.
        borders: `[batch + 1]`, running sums of the sequences' lengths. Kernels read both where they are.
        page: Keys of a page.
    """

    paged: ClassVar[bool] = True
    one_offset: ClassVar[bool] = False
    plain: ClassVar[bool] = False
    table: Tensor
    borders: Tensor
    page: int

    @classmethod
    def of(cls, table: Tensor, borders: Tensor, page: int, kv_len: int, window: int | None) -> Self:
        """The structure of a step over `kv_len` keys of all pages together."""
        return cls(len(table), 1, kv_len, True, window=window, table=table, borders=borders, page=page)

    @property
    def longest(self) -> int:
        """At most so many tokens have the sequences: as many as the table has room for."""
        return self.table.shape[1] * self.page

    def segments(self) -> None:
        """None: a sequence's pages do not adjoin."""
        return

    def positions(self, device: torch.device | str) -> Tensor:
        """`[batch, 1]`: how many tokens of its sequence stand before each query; -1 where it has none."""
        return self.borders.to(device).diff()[:, None].long() - 1

    def places(self, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """`[batch, longest]`: where in the row of all pages each key of a sequence lies, and whether there is one."""
        at = torch.arange(self.longest, device=device)
        there = at < self.borders.to(device).diff()[:, None]
        return self.table.to(device).long().repeat_interleave(self.page, 1) * self.page + at % self.page, there

    def visible(self, *rows: Any, device: torch.device | str = "cpu", **some: Any) -> Tensor:
        """Boolean `[batch, heads or 1, 1, kv_len]`: the definition; there is one row, which is always given."""
        places, keep = self.places(device)
        at = torch.arange(self.longest, device=device)
        if self.window is not None:
            keep = keep & ((at > self.positions(device) - self.window) | (at < self.sinks))
        visible = torch.zeros(self.batch, self.kv_len, dtype=torch.bool, device=device)
        visible[keep.nonzero()[:, 0], places[keep]] = True
        keep = visible[:, None, None]
        return keep if self.mask is None else keep & self.mask.to(device)
