"""A score rank: queries and keys in the few columns that keep most of the scores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Self

import torch
from torch import Tensor

from ...attention.call import AttentionCall
from ..record import read_fields
from ..tensors import LayerTensors
from .part import Colour, Operands, Setting, is_decode, register


@register
@dataclass(frozen=True)
class Rank(Operands):
    """Queries and keys projected onto `rank` columns; see `stats.spectrum.score_factors`."""

    rank: Annotated[int, (1, 1 << 16)]

    name = "rank"
    aspect = "rank"
    families = ("rank",)
    by_default = True
    on_cuda = False  # no figure shows that they pay there
    blank = 0
    crosses = False

    def __post_init__(self) -> None:
        read_fields(self)

    @property
    def label(self) -> str:
        """`r32`."""
        return f"r{self.rank}"

    @property
    def meaning(self) -> str:
        """What the label says."""
        return f"scores of rank {self.rank}"

    def tinted(self, colour: Colour) -> Colour:
        """Redder."""
        return min(255, colour[0] + 90), colour[1], colour[2]

    @property
    def columns(self) -> int:
        """The rank."""
        return self.rank

    def tensors(self, layer: LayerTensors, head: int) -> Mapping[str, Tensor]:
        """The head's bases, cut to the rank."""
        return {
            f"query_basis.{head}": layer.query_basis[head][:, : self.rank],
            f"key_basis.{head}": layer.key_basis[head][:, : self.rank],
        }

    def misfit(self, layer: LayerTensors, head: int, kv_heads: int, head_dim: int | None) -> str | None:
        """Both bases `[head_dim, at least rank]`."""
        for name, bases in (("query_basis", layer.query_basis), ("key_basis", layer.key_basis)):
            basis = bases.get(head)
            if basis is None:
                return f"rank {self.rank} of head {head} needs its {name}, which the plan's tensors lack"
            shape = tuple(basis.shape)
            fits = basis.is_floating_point() and len(shape) == 2 and shape[1] >= self.rank
            if not fits or (head_dim is not None and shape[0] != head_dim):
                return (
                    f"{name} of head {head} is {basis.dtype} {shape}, expected floating-point "
                    f"[{head_dim or 'head_dim'}, {self.rank}]"
                )
        return None

    def defined(self, call: AttentionCall, heads: Sequence[int], layer: LayerTensors) -> AttentionCall:
        """Queries and keys in the columns that keep most of the scores.

        One query, or a few, is folded back to the head's width instead: the same scores without touching the cached
        keys.
        """
        query, key = call.query, call.key
        groups = query.shape[1] // key.shape[1]
        query_basis = torch.stack([layer.query_basis[head][:, : self.rank] for head in heads]).to(query)
        key_basis = torch.stack([layer.key_basis[head][:, : self.rank] for head in heads]).to(query)
        if is_decode(call.structure) is True:
            fold = (query_basis @ key_basis.mT).repeat_interleave(groups, dim=0)
            return replace(call, query=query @ fold)
        return replace(call, query=query @ query_basis.repeat_interleave(groups, dim=0), key=key @ key_basis)

    def left(self, layer: LayerTensors) -> LayerTensors:
        """Mean keys are of the unprojected ones."""
        return LayerTensors()

    @classmethod
    def candidates(cls, setting: Setting) -> Sequence[Self]:
        """A half and three quarters of the head size, where that is a multiple of 16."""
        ranks = sorted({setting.head_dim // 2, setting.head_dim * 3 // 4})
        return [cls(rank) for rank in ranks if rank >= 16 and rank % 16 == 0]
