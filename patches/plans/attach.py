"""Gives plans to models, in `config.adaattn["plan"]`, and takes them away.

Each attention module resolves and checks its part of the plan at its first call (see `fit`); `load_plan` does so for
all of them at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from adaattn_hf.plans import execute as execute  # its operators are registered before a graph is traced
from adaattn_hf.plans.plan import Plan, PlanError
from adaattn_hf.plans.program import Program
from adaattn_hf.plans.store import CARRIED, CONFIG_KEY

from ..models.support import Holder, Model, configs_of, model_in, refuse_other_attention
from . import fit
from .configured import refuse_other_configuration
from .door import door_of, remove_doors
from .fit import PROGRAM_SLOT, Resolved
from .layers import attention_modules
from .running import Allowed


def attach(model: nn.Module, plan: Plan, *, unverified: bool = False) -> None:
    """Gives a model a plan and checks it against every layer at once; PlanError if it does not belong to the model."""
    raw, programs = programs_for(model, plan, unverified=unverified)
    owners: dict[int, Any] = {id(module.config): module.config for module, _ in programs.values()}
    for config in owners.values():
        kept = {name: value for name, value in carried_by(config).items() if name != CARRIED}
        config.adaattn = {**kept, **raw}
    for module, program in programs.values():
        module.__dict__[PROGRAM_SLOT] = Resolved.of(module, module.config.adaattn, program, door_of(model))  # type: ignore[union-attr]


def programs_for(
    model: nn.Module, plan: Plan, *, unverified: bool
) -> tuple[dict[str, Any], dict[int, tuple[nn.Module, Program | None]]]:
    """Returns the settings that give a model a plan, and by layer its module and its part of it; raises as `attach`."""
    modules = dict(attention_modules(model, plan.model_type))
    if not modules:
        refuse_other_configuration(plan, getattr(model, "config", model))
    missing = [layer.layer for layer in plan.layers if layer.layer not in modules]
    if missing:
        raise PlanError(f"the plan has layers {missing!s:.200}, the model's attention layers are {sorted(modules)}")
    data = plan.to_dict()
    raw: dict[str, Any] = {CONFIG_KEY: Allowed(data) if unverified else data}
    programs = {index: (module, fit.resolve(module, plan, raw)) for index, module in modules.items()}
    fit.refuse_other_weights(model, plan, anew=True)
    return raw, programs


def remove_plan(model: Model) -> Model:
    """Removes the plan from a model: every layer is exact again. Returns the model."""
    held = model_in(model)
    remove_doors(held)
    for module in held.modules():
        module.__dict__.pop(PROGRAM_SLOT, None)
    for config in configs_of(held):
        settings = carried_by(config)
        if CONFIG_KEY in settings:
            rest = {name: value for name, value in settings.items() if name not in (CONFIG_KEY, CARRIED)}
            # a plan of all models of the type is not given again
            if rest or hasattr(type(config), "adaattn"):
                config.adaattn = rest
            else:
                del config.adaattn
    return model


def plan_of(model: Holder) -> Plan | None:
    """Returns the plan that a model carries, or `None`."""
    data = _data_of(model_in(model))
    return None if data is None else Plan.from_dict(data)


def _data_of(model: nn.Module) -> Mapping[str, Any] | None:
    plans = (carried_by(config).get(CONFIG_KEY) for config in configs_of(model))
    return next((plan for plan in plans if plan is not None), None)


def carried_by(config: Any) -> Mapping[str, Any]:
    """Returns the settings of this package in a model's configuration, empty where there are none."""
    settings = getattr(config, "adaattn", None)
    return settings if isinstance(settings, Mapping) else {}


def load_plan(model: Model, plan: Plan | str | Path | None = None, *, unverified: bool = False) -> Model:
    """Gives a model a plan, or reads the one in its configuration, and checks it against every layer at once.

    Without it every layer reads its part of the configuration's plan in the first forward pass; a graph needs it before
    it is traced.

    Args:
        model: A model, as `from_pretrained` leaves it, or what holds one (a pipeline, PEFT, sentence-transformers).
        plan: A plan, the file or directory that holds it, or the id of a repository of the Hub (see
            `Plan.from_pretrained`); None for the one that the model carries.
        unverified: Run the plan though held-out text has not shown it good: it was never verified, failed, or
                has figures that today's limits refuse.

    Returns:
        `model`; `plan_of(model)` is its plan.

    Raises:
        PlanError: The model has no plan, or one that does not belong to it, or runs another attention.
    """
    held = model_in(model)
    if plan is None:
        data = _data_of(held)
        if data is None:
            raise PlanError(
                f"model: the configuration of this {type(held).__name__} holds no plan; make one with "
                "`adaattn calibrate`"
            )
        found, unverified = Plan.from_dict(data), unverified or isinstance(data, Allowed)
    else:
        found = Plan.from_pretrained(plan)
    refuse_other_attention(held, PlanError)
    attach(held, found, unverified=unverified)
    return model
