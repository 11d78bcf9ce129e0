"""Named settings, read from the YAML files of `adaattn_hf.configs`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import Any

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
    return AdaAttnConfig.from_dict({"preset": name, **_read(name)})


def budget_of(name: str) -> float:
    """The budget that a preset's file names; ConfigError as of `load_preset`."""
    return float(_read(name).get("budget", 0.0))


def _read(name: str) -> Mapping[str, Any]:
    names = preset_names()
    if name not in names:
        raise ConfigError(unknown("preset", name, names))
    text = resources.files("adaattn_hf.configs").joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text) or {}
