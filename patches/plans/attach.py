"""Binds plans to models and takes them away, and sets this package's settings on a model and each of its towers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import nn
from transformers import PreTrainedConfig

from adaattn_hf.config import AdaAttnConfig, ConfigError, settings_of
from adaattn_hf.errors import warn
from adaattn_hf.plans import execute as execute  # its operators are registered before a graph is traced
from adaattn_hf.plans.plan import Plan, PlanError
from adaattn_hf.plans.store import CARRIED, CONFIG_KEY
from adaattn_hf.presets import load_preset

from ..models.positions import configs_of
from ..models.support import Holder, Model, model_in, refuse_no_model, refuse_other_attention, runs_ours
from .bound import BoundPlan, bound_plan, carried_by, say, unbind
from .check import allowed_by, machine_name


def plan_in(model: nn.Module) -> Plan | None:
    """Returns the plan in the configuration of a model, whether the model runs by it or not; None without one."""
    plans = (carried_by(config).get(CONFIG_KEY) for config in configs_of(model.modules()))
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
    elif plan is not None and any(config.model_type == plan.model_type for config in configs_of(inner.modules())):
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
    for config in configs_of(inner.modules()):
        settings = carried_by(config)
        if CONFIG_KEY in settings:
            rest = {name: value for name, value in settings.items() if name not in (CONFIG_KEY, CARRIED)}
            if rest:
                config.adaattn = rest
            else:
                del config.adaattn
    return model


def configure(model: Model, settings: AdaAttnConfig | str) -> Model:
    """Set AdaAttn's settings on a model and all its towers; they are saved with it.

    A preset allows a loss budget, which only a plan can spend. The model's plan is kept if its own budget is within the
    preset's, else removed with a warning; `load_plan` refuses one beyond it. Without a plan every layer is exact; a
    warning then names the command that makes one.

    Args:
        model: Any Transformers model, or what holds one (a pipeline, PEFT, sentence-transformers).
        settings: The settings, or the name of a preset.

    Returns:
        `model`; its `config.adaattn` holds the settings.

    Raises:
        ConfigError: Unknown preset or setting, settings of another type, or there is no Transformers model.
    """
    inner = model_in(model)
    refuse_no_model(inner)
    if not isinstance(settings, (AdaAttnConfig, str)):
        raise ConfigError(
            f"settings: got {settings!r:.80}, expected an AdaAttnConfig or the name of a preset; call "
            "adaattn_hf.configure(model, adaattn_hf.AdaAttnConfig(budget=0.01)), say"
        )
    configs = [config for config in configs_of(inner.modules()) if isinstance(config, PreTrainedConfig)]
    if not configs:
        raise ConfigError(
            f"model: got {type(inner).__name__}, expected a Transformers model, or an object that contains one "
            "(pipeline, PEFT model); pass what from_pretrained returned"
        )
    chosen = load_preset(settings) if isinstance(settings, str) else settings
    if isinstance(settings, str):
        held = next((one for one in map(carried_by, configs) if one.get(CONFIG_KEY) is not None), {CONFIG_KEY: None})
        plan, allowed = held[CONFIG_KEY], allowed_by(chosen.budget)
        budget = 0.0 if plan is None else Plan.from_dict(plan).budget
        if budget <= allowed:
            chosen = replace(chosen, plan=plan, tensors=held.get(CARRIED))
        elif allowed > 0.0:
            warn(
                f"adaattn: the model's plan was made for a budget of {budget:g} nats/token, more than the preset "
                f"{chosen.preset!r} allows ({allowed:.4g}); it is taken away"
            )
    data = chosen.to_dict()
    if (bound := bound_plan(inner)) is not None and data["plan"] != bound.data:
        unbind(inner)
    for config in configs:
        config.adaattn = data
    settings_of(data)  # parsed now, so that its warnings come here
    return model
