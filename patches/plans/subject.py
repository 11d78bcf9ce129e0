"""A model to calibrate, with what `calibration` needs to know of it and cannot ask the forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from adaattn_hf.plans.plan import EXACT, PLAN_FORMAT, LayerPlan, Plan

from ..models.positions import learned_positions, stated_positions
from .attach import load_plan, remove_plan
from .configured import computes_by, name_of_model
from .hashes import model_hash, weight_hash
from .layers import attention_modules, number_layers
from .parts import module_dtype


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
        limits = (learned_positions(self.model), stated_positions(self.model.config))
        return min((count for count in limits if count is not None), default=None)

    def exact_plan(self, indices: Sequence[int]) -> Plan:
        """A plan of this model that names these layers, and leaves each exact: what others are made from."""
        _, first = next(attention_modules(self.model), (0, None))
        if first is None:
            raise ValueError("the model has no attention modules with a layer_idx; a plan could not name its layers")
        config: Any = first.config
        modules = dict(attention_modules(self.model, config.model_type))
        return Plan(
            format=PLAN_FORMAT,
            model_type=str(config.model_type),
            weight_hash=model_hash(self.model),
            configuration=computes_by(config),
            dtype=module_dtype(modules[indices[0]]),
            adaattn=version("adaattn-hf"),
            torch=torch.__version__,
            transformers=version("transformers"),
            budget=0.0,
            seed=0,
            data_fingerprint="",
            protocol={},
            lengths=(),
            layers=tuple(LayerPlan(index, weight_hash(modules[index]), (EXACT,)) for index in indices),
            units=(),
            verified=None,
            tensors="",
            attention_layers=tuple(indices),
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
