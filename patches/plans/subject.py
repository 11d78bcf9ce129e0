"""A model to calibrate, with what `calibration` needs to know of it and cannot ask the forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from adaattn_hf.plans.plan import Plan

from .attach import load_plan, remove_plan
from .configured import computes_by, name_of_model
from .hashes import model_hash, weight_hash
from .layers import attention_modules, number_layers
from .parts import module_dtype
from .positions import learned_positions, stated_positions


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


class Subject:
    """A model to calibrate, which runs our attention (else a ValueError).

    Layers that the model does not number are numbered here.
    """

    def __init__(self, model: nn.Module) -> None:
        config: Any = model.config
        if config._attn_implementation != "adaattn":
            raise ValueError(
                f"attn_implementation is {config._attn_implementation!r}, expected 'adaattn': "
                'load the model with from_pretrained(..., attn_implementation="adaattn")'
            )
        self.model = model
        self.name = name_of_model(model)
        number_layers(model)

    @property
    def positions(self) -> int | None:
        """The longest input that the model can read."""
        known = (learned_positions(self.model), stated_positions(self.model.config))
        return min((count for count in known if count is not None), default=None)

    def binding(self, indices: Sequence[int]) -> Binding:
        """What a plan for these layers is bound to."""
        _, first = next(attention_modules(self.model), (0, None))
        if first is None:
            raise ValueError("the model has no attention modules with a layer_idx; a plan could not name its layers")
        config: Any = first.config
        modules = dict(attention_modules(self.model, config.model_type))
        return Binding(
            model_type=str(config.model_type),
            dtype=module_dtype(modules[indices[0]]),
            hashes={index: weight_hash(modules[index]) for index in indices},
            model_hash=model_hash(self.model),
            configuration=computes_by(config),
        )

    def weight_hash(self) -> str:
        """Hash of all that the model saves."""
        return weight_hash(self.model)

    def give(self, plan: Plan) -> None:
        """Lets the model run by a plan."""
        load_plan(self.model, plan)

    def remove_plan(self) -> None:
        """Takes away the plan that the model carries."""
        remove_plan(self.model)
