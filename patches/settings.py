"""Sets this package's settings on a model and on each of its towers, whose layers read their own configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from adaattn_hf.config import AdaAttnConfig, settings_in
from adaattn_hf.errors import warn
from adaattn_hf.plans.plan import Plan
from adaattn_hf.presets import load_preset


def configure(model: PreTrainedModel, settings: AdaAttnConfig | str) -> AdaAttnConfig:
    """Set AdaAttn's settings on a model and all its towers; they are saved with it.

    A preset allows a loss budget, which only a plan can spend. The model's plan is kept if its own budget is within the
    preset's, else removed with a warning. Without a plan every layer is exact; a warning then names the command that
    makes one.

    Args:
        model: Any Transformers model.
        settings: The settings, or the name of a preset.

    Returns:
        The settings.

    Raises:
        ConfigError: Unknown preset or setting.
    """
    configs: dict[int, Any] = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    configs[id(model.config)] = model.config
    chosen = load_preset(settings) if isinstance(settings, str) else settings
    if isinstance(settings, str):
        held = (getattr(config, "adaattn", None) for config in configs.values())
        present = [one for one in held if isinstance(one, Mapping)]
        carried = next((plan for one in present if (plan := one.get("plan")) is not None), None)
        plan = _within(carried, chosen)
        tensors = next((found for one in present if (found := one.get("tensors")) is not None), None)
        if plan is not None:
            chosen = replace(chosen, plan=plan, tensors=tensors)
    data = chosen.to_dict()
    for config in configs.values():
        if hasattr(config, "to_dict"):
            config.adaattn = data
    settings_in(model.config)  # parsed now, so that its warnings come here
    return chosen


def _within(plan: Mapping[str, Any] | None, preset: AdaAttnConfig) -> Mapping[str, Any] | None:
    """Returns the plan if its budget is within the preset's, else None.

    Raises:
        PlanError: It is malformed.
    """
    budget = 0.0 if plan is None else Plan.from_dict(plan).budget
    if budget <= math.log1p(preset.budget) * (1 + 1e-6):
        return plan
    if preset.budget > 0:
        warn(
            f"adaattn: the model's plan was made for a budget of {budget:g} nats/token, more than the preset "
            f"{preset.preset!r} allows ({math.log1p(preset.budget):.4g}); it is taken away"
        )
    return None
