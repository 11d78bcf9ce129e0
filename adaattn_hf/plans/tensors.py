"""Calibrated tensors of a layer: mean keys and the bases of score ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from torch import Tensor


@dataclass(frozen=True, eq=False)
class LayerTensors:
    """Calibrated tensors of one layer: key means `[num_kv_heads, head_dim]`, zeros if absent, and per head bases.

    Bases are `[head_dim, rank]`; see `stats.spectrum.score_factors`.
    """

    key_mean: Tensor | None = None
    query_basis: Mapping[int, Tensor] = field(default_factory=dict)
    key_basis: Mapping[int, Tensor] = field(default_factory=dict)

    def of_heads(self, heads: Sequence[int]) -> Self:
        """The tensors of some key/value heads."""
        return type(self)(
            key_mean=None if self.key_mean is None else self.key_mean[list(heads)],
            query_basis={index: self.query_basis[head] for index, head in enumerate(heads) if head in self.query_basis},
            key_basis={index: self.key_basis[head] for index, head in enumerate(heads) if head in self.key_basis},
        )
