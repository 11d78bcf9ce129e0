"""Putting settings on a model: every tower's configuration gets them, since each layer sees its own tower's."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from adaattn_hf.config import AdaAttnConfig, settings_in
from adaattn_hf.plans.store import settings_of
from adaattn_hf.presets import load_preset

__all__ = ["configure"]


def configure(model: PreTrainedModel, settings: AdaAttnConfig | str) -> AdaAttnConfig:
    """Set AdaAttn's settings on a model and all its towers; they are saved with it.

    A preset is a budget, and a plan spends it. A plan that the model carries is kept where its own budget is within the
    preset's; a plan that spends more is taken away, which is said. Where no plan is left every layer is exact, which is
    said, too, with the command that makes a plan.

    Args:
        model: Any Transformers model.
        settings: Settings as they are to be, or the name of a preset.

    Returns:
        The settings.

    Raises:
        ConfigError: Unknown preset or setting.
    """
    configs: dict[int, Any] = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    configs[id(model.config)] = model.config
    chosen = load_preset(settings) if isinstance(settings, str) else settings
    if isinstance(settings, str):
        present = [settings_of(config) for config in configs.values()]
        carried = next((plan for one in present if (plan := one.get("plan")) is not None), None)
        plan = _within(carried, chosen)
        said = any(one.get("unverified") is True for one in present)
        chosen = replace(chosen, plan=plan, unverified=plan is not None and said)
    data = chosen.to_dict()
    for config in configs.values():
        if hasattr(config, "to_dict"):
            config.adaattn = data
    settings_in(model.config)  # reads them once, and says now what is to be said
    return chosen


def _within(plan: Mapping[str, Any] | None, preset: AdaAttnConfig) -> Mapping[str, Any] | None:
    """The plan, where it spends no more than the preset allows."""
    if plan is None or float(plan.get("budget", math.inf)) <= math.log1p(preset.budget) * (1 + 1e-6):
        return plan
    if preset.budget > 0:
        warnings.warn(
            f"adaattn: the model's plan was made for a budget of {plan['budget']:g} nats/token, more than the preset "
            f"{preset.preset!r} allows ({math.log1p(preset.budget):.4g}); it is taken away",
            UserWarning,
            stacklevel=3,
        )
    return None
