"""Binds plans to models, and takes them away."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from adaattn_hf.plans import execute as execute  # its operators are registered before a graph is traced
from adaattn_hf.plans.plan import Plan, PlanError
from adaattn_hf.plans.store import CARRIED, CONFIG_KEY

from ..models.support import Holder, Model, configs_of, model_in, refuse_other_attention, runs_ours
from .bound import BoundPlan, bound_plan, carried_by, say, unbind
from .check import machine_name


def plan_in(model: nn.Module) -> Plan | None:
    """Returns the plan in the configuration of a model, whether the model runs by it or not; None without one."""
    plans = (carried_by(config).get(CONFIG_KEY) for config in configs_of(model))
    data = next((plan for plan in plans if plan is not None), None)
    return None if data is None else Plan.from_dict(data)


def load_plan(model: Model, plan: Plan | str | Path | None = None, *, unverified: bool = False) -> Model:
    """Binds a plan to a model: checks it against all weights, settings and layers, and lets the model run by it.

    A model whose configuration holds a plan (`adaattn calibrate --in-place`, `save_pretrained`) is exact until this is
    called. Each pass of the model then compares it with what was checked.

    Args:
        model: A model, as `from_pretrained` leaves it, or what holds one (a pipeline, PEFT, sentence-transformers).
        plan: A plan, the file or directory that holds it, or the id of a repository of the Hub (see
            `Plan.from_pretrained`); None for the one that the model's configuration holds.
        unverified: Run the plan though held-out text has not shown it good: it was never verified, failed, or
                has figures that today's limits refuse.

    Returns:
        `model`; `plan_of(model)` is its plan.

    Raises:
        PlanError: The model has no plan, or one that does not belong to it, or runs another attention.
    """
    inner = model_in(model)
    refuse_other_attention(inner, PlanError)
    if plan is None:
        bound, chosen = bound_plan(inner), plan_in(inner)
        if bound is not None and (chosen is None or chosen == bound.plan):
            chosen, unverified = bound.plan, unverified or bound.unverified
        if chosen is None:
            raise PlanError(
                f"model: the configuration of this {type(inner).__name__} holds no plan; make one with "
                "`adaattn calibrate`"
            )
    else:
        chosen = Plan.from_pretrained(plan)
    BoundPlan.of(inner, chosen, unverified=unverified).install(inner)
    priced, machine = str(chosen.protocol.get("machine", "")), machine_name(next(inner.parameters()).device)
    if priced and priced.rsplit(", ", 2)[0] != machine:  # it also names threads and torch
        say(
            chosen.weight_hash,
            f"the plan keeps its budget here as there, but was chosen by times that were measured on {priced}; here is "
            f"{machine}: it may gain less; `adaattn calibrate MODEL --data FILES --from PLAN` prices and chooses anew",
        )
    return model


def load_carried(model: Model, plan: Plan | None = None) -> Model:
    """Binds the plan that a model's configuration holds, or one for models that carry none, if it runs our attention.

    A model that runs another attention is left without; returns the model.
    """
    inner = model_in(model)
    if not runs_ours(inner):
        unbind(inner)
    elif plan_in(inner) is not None:
        load_plan(inner)
    elif plan is not None and any(config.model_type == plan.model_type for config in configs_of(inner)):
        load_plan(inner, plan)
    return model


def plan_of(model: Holder) -> Plan | None:
    """Returns the plan by which a model runs, None where it is exact."""
    bound = bound_plan(model_in(model))
    return None if bound is None else bound.plan


def remove_plan(model: Model) -> Model:
    """Removes the plan from a model and its configuration: every layer is exact again. Returns the model."""
    inner = model_in(model)
    unbind(inner)
    for config in configs_of(inner):
        settings = carried_by(config)
        if CONFIG_KEY in settings:
            rest = {name: value for name, value in settings.items() if name not in (CONFIG_KEY, CARRIED)}
            if rest:
                config.adaattn = rest
            else:
                del config.adaattn
    return model
