"""Calibrated tensors of a layer: mean keys and the bases of score ranks."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, eq=False)
class LayerTensors:
    """Calibrated tensors of one layer.

    Attributes:
        key_mean: `[num_kv_heads, head_dim]`, subtracted from keys before int8 rounding; zeros when absent.
        query_basis: Per key/value head `[head_dim, rank]`; see `stats.spectrum.score_factors`.
        key_basis: Per key/value head `[head_dim, rank]`.
        folded: Whether the model's weights project onto the bases already: a rank is then its first columns.
    """

    key_mean: Tensor | None = None
    query_basis: Mapping[int, Tensor] = field(default_factory=dict)
    key_basis: Mapping[int, Tensor] = field(default_factory=dict)
    folded: bool = False

    def of_heads(self, heads: Sequence[int]) -> LayerTensors:
        """The tensors of some key/value heads."""
        return LayerTensors(
            None if self.key_mean is None else self.key_mean[list(heads)],
            {place: self.query_basis[head] for place, head in enumerate(heads) if head in self.query_basis},
            {place: self.key_basis[head] for place, head in enumerate(heads) if head in self.key_basis},
            self.folded,
        )


MOST_CARRIED = 1 << 20
"""Bases and means of more bytes do not travel in a configuration, but in a file beside the weights alone."""


def carried_bytes(text: str) -> bytes:
    """The bytes behind base64; what is none has no bytes, and so not the hash that a plan names."""
    try:
        return base64.b64decode(text[: 2 * MOST_CARRIED], validate=True)
    except ValueError:
        return b""
