"""What a plan is bound to: the model that it was made for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class Binding:
    """The model that a plan is made for.

    Attributes:
        model_type: `config.model_type` of the model with the attention modules.
        dtype: Dtype of the attention weights, `float32` and so on.
        hashes: By layer: hash of the attention weights.
        model_hash: Hash of all weights of the model.
        configuration: The settings by which it computes.
    """

    model_type: str
    dtype: str
    hashes: Mapping[int, str]
    model_hash: str
    configuration: dict[str, Any]
