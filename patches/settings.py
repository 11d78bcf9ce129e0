"""Putting settings on a model: every tower's configuration gets them, since each layer sees its own tower's."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from adaattn_hf.config import AdaAttnConfig
from adaattn_hf.presets import load_preset

__all__ = ["configure"]


def configure(model: PreTrainedModel, settings: AdaAttnConfig | str) -> AdaAttnConfig:
    """Set AdaAttn's settings on a model and all its towers; they are saved with it.

    Args:
        model: Any Transformers model.
        settings: Settings, or the name of a preset.

    Returns:
        The settings.

    Raises:
        ConfigError: Unknown preset or setting.
    """
    chosen = load_preset(settings) if isinstance(settings, str) else settings
    data = chosen.to_dict()
    configs: dict[int, Any] = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    configs[id(model.config)] = model.config
    for config in configs.values():
        if hasattr(config, "to_dict"):
            config.adaattn = data
    return chosen
