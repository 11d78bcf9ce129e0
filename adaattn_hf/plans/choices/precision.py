"""A precision: products in bfloat16 or int8."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from ...attention.call import AttentionCall
from ...attention.heads import through_precision
from ...errors import unknown
from ..record import PlanError
from ..tensors import LayerTensors
from .part import Colour, Operands, Setting, is_decode, register

_NAMES = ("bf16", "int8")


@register
@dataclass(frozen=True)
class Precision(Operands):
    """Products in fewer bits (`bf16`, `int8`: see `HeadRules`) of sequences with `MIN_PREFILL_ROWS` query rows."""

    precision: str

    name = "precision"
    aspect = "precision"
    families = _NAMES
    by_default = True
    for_quantised_cache = "dropped"
    blank = "model"
    order = 1

    def __post_init__(self) -> None:
        """Refuse precisions that there are none of."""
        if self.precision not in _NAMES:
            raise PlanError(unknown("precision", str(self.precision), ("model", *_NAMES)))

    @property
    def label(self) -> str:
        """`bf16` or `int8`."""
        return self.precision

    @property
    def meaning(self) -> str:
        """What the label says."""
        return {"bf16": "products in bfloat16", "int8": "products in 8 bits"}[self.precision]

    def tinted(self, colour: Colour) -> Colour:
        """Greener, the more so in fewer bits."""
        return colour[0], min(255, colour[1] + (60 if self.precision == "bf16" else 110)), colour[2]

    def head_rule(self, decode: bool) -> Mapping[str, Any]:
        """The precision; those of decode steps are computed in the model's."""
        return {} if decode else {"precision": self.precision}

    @property
    def has_gradient(self) -> bool:
        """Rounding to int8 has none."""
        return self.precision != "int8"

    def tensors(self, layer: LayerTensors, head: int) -> Mapping[str, Tensor]:
        """The layer's mean keys, where keys are smoothed."""
        return {} if self.precision != "int8" or layer.key_mean is None else {"key_mean": layer.key_mean}

    def misfit(self, layer: LayerTensors, head: int, kv_heads: int, head_dim: int | None) -> str | None:
        """Mean keys `[num_kv_heads, head_dim]`, where there are any."""
        mean = layer.key_mean
        if mean is None:
            return None
        shape = tuple(mean.shape)
        fits = mean.is_floating_point() and len(shape) == 2 and shape[0] == kv_heads
        if fits and head_dim in (None, shape[1]):
            return None
        return f"key_mean is {mean.dtype} {shape}, expected floating-point [{kv_heads}, {head_dim or 'head_dim'}]"

    def defined(self, call: AttentionCall, heads: Sequence[int], layer: LayerTensors) -> AttentionCall:
        """Queries, keys and values rounded, in their own dtype."""
        if is_decode(call.structure) is True:
            return call
        mean = None if layer.key_mean is None else layer.key_mean[list(heads)].to(call.key)[None, :, None]
        query, key, value = through_precision(self.precision, call.query, call.key, call.value, mean)
        return replace(call, query=query, key=key, value=value)

    def running(self, call: AttentionCall, heads: Sequence[int], layer: LayerTensors) -> AttentionCall:
        """Cast where torch computes in it, rounded where it does not."""
        if self.precision != "bf16" or is_decode(call.structure) is True:
            return self.defined(call, heads, layer)
        query, key, value = (tensor.to(torch.bfloat16) for tensor in (call.query, call.key, call.value))
        bias = None if call.bias is None else call.bias.to(torch.bfloat16)
        return replace(call, query=query, key=key, value=value, bias=bias)

    @classmethod
    def candidates(cls, setting: Setting) -> Sequence[Self]:
        """Bfloat16 for float32 models alone, int8 for all."""
        useful = ("bf16", "int8") if setting.dtype == "float32" else ("int8",)
        return [cls(name) for name in useful if name in setting.families]
