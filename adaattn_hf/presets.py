"""Named settings, read from the YAML files of `adaattn_hf.configs`."""

from __future__ import annotations

from importlib import resources

import yaml

from .config import AdaAttnConfig, ConfigError
from .errors import unknown


def preset_names() -> tuple[str, ...]:
    """Names of the presets that come with the package."""
    files = resources.files("adaattn_hf.configs").iterdir()
    return tuple(sorted(f.name.removesuffix(".yaml") for f in files if f.name.endswith(".yaml")))


def load_preset(name: str) -> AdaAttnConfig:
    """The settings of a preset.

    Raises:
        ConfigError: Unknown name; lists the known ones and the nearest.
    """
    names = preset_names()
    if name not in names:
        raise ConfigError(unknown("preset", name, names))
    text = resources.files("adaattn_hf.configs").joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    return AdaAttnConfig.from_dict({"preset": name, **(yaml.safe_load(text) or {})})
