"""Binds the plan in a model's configuration to the model when one of its layers first runs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .patches.plans.bound import BoundPlan, carried_by, checked_layer, unbind
from .patches.plans.hashes import base_of
from .patches.plans.layers import running_model
from .patches.plans.slots import LAYER, PLAN
from .plans.bound_layer import BoundLayer
from .plans.plan import Plan, PlanError
from .plans.store import CONFIG_KEY


class ConfiguredPlan(BoundPlan):
    """A plan that a model runs by while it is in its configuration, as nobody can take it away from a kernel."""

    def check_pass(self, trunk: nn.Module) -> None:
        """Refuses what no longer is as it was checked (PlanError)."""
        if any(carried_by(config).get(CONFIG_KEY) is self.data for config in self.readers):
            super().check_pass(trunk)


def layer_by(module: nn.Module, data: Mapping[str, Any]) -> BoundLayer | None:
    """Returns a module's part of the plan in its configuration, None if it is exact; PlanError if it is another's.

    Nobody hands the model to a kernel that goes by its name: the first layer that is called binds the plan for all.
    """
    layer: BoundLayer | None = module.__dict__.get(LAYER)
    if torch.compiler.is_compiling():
        if LAYER not in module.__dict__:
            raise PlanError("the plan was not read before compiling; call the model once before torch.compile")
        return layer
    bound = None if layer is None or layer.owner is None else layer.owner()
    if LAYER not in module.__dict__ or (layer is not None and (bound is None or bound.data is not data)):
        model = running_model(module)
        if model is None:
            raise PlanError(
                f"{type(module).__name__}: runs outside of a model, whose plan is one of all its layers; "
                "call the model, or delete config.adaattn"
            )
        found, trunk = ConfiguredPlan.of(model, Plan.from_dict(data)), base_of(model)
        found.data = data
        unbind(model)
        trunk.__dict__[PLAN] = found
        found.give()
        found.hook(trunk)
    return checked_layer(module)
