"""Gives a plan to every model of its type in a process, for programs that load a model by themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adaattn_hf.config import GIVEN
from adaattn_hf.plans.plan import Plan, PlanError
from adaattn_hf.plans.store import CONFIG_KEY


def configuration_of(plan: Plan) -> type[Any]:
    """Returns the class of configurations that a plan is of; PlanError if there is none, or its tensors are lost."""
    from transformers import CONFIG_MAPPING

    plan.tensor_bytes()
    if plan.model_type not in CONFIG_MAPPING:
        raise PlanError(
            f"model_type is {plan.model_type!r}, which no configuration of Transformers has; load the plan in the "
            "program, by adaattn_hf.load_plan(model, directory)"
        )
    return CONFIG_MAPPING[plan.model_type]  # type: ignore[no-any-return]


def give(directory: str | Path) -> None:
    """Gives a plan to all models of its type that carry none; each checks it when it first runs (PlanError)."""
    plan = Plan.from_pretrained(directory)
    settings = {CONFIG_KEY: plan.to_dict()}
    GIVEN[plan.model_type] = settings
    # a graph that is traced before any call asks the class, and says that the model is to be called once first
    configuration_of(plan).adaattn = settings
