"""Sets this package's settings on a model and on each of its towers, whose layers read their own configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from transformers import PreTrainedConfig

from adaattn_hf.config import AdaAttnConfig, ConfigError, settings_of
from adaattn_hf.errors import warn
from adaattn_hf.plans.plan import Plan
from adaattn_hf.plans.store import CARRIED, CONFIG_KEY
from adaattn_hf.presets import load_preset

from ..models.support import Model, configs_of, model_in, refuse_no_model
from .bound import bound_plan, unbind
from .check import allowed_by


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
    configs = [config for config in configs_of(inner) if isinstance(config, PreTrainedConfig)]
    if not configs:
        raise ConfigError(
            f"model: got {type(inner).__name__}, expected a Transformers model, or an object that contains one "
            "(pipeline, PEFT model); pass what from_pretrained returned"
        )
    chosen = load_preset(settings) if isinstance(settings, str) else settings
    if isinstance(settings, str):
        present = [carried for config in configs if isinstance(carried := getattr(config, "adaattn", None), Mapping)]
        plan, tensors = (
            next((carried[key] for carried in present if carried.get(key) is not None), None)
            for key in (CONFIG_KEY, CARRIED)
        )
        budget, allowed = 0.0 if plan is None else Plan.from_dict(plan).budget, allowed_by(chosen.budget)
        if budget <= allowed:
            chosen = replace(chosen, plan=plan, tensors=None if plan is None else tensors)
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
