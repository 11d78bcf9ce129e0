"""Named settings, read from the YAML files of `adaattn_hf.configs`."""

from __future__ import annotations

import difflib
from importlib import resources

import yaml

from .config import AdaAttnConfig, ConfigError

__all__ = ["load_preset", "preset_names"]

_NOT_PRESETS = ("bench", "bench_cuda")


def preset_names() -> tuple[str, ...]:
    """Names of the presets that come with the package."""
    files = resources.files("adaattn_hf.configs").iterdir()
    names = (f.name.removesuffix(".yaml") for f in files if f.name.endswith(".yaml"))
    return tuple(sorted(name for name in names if name not in _NOT_PRESETS))


def load_preset(name: str) -> AdaAttnConfig:
    """The settings of a preset.

    Raises:
        ConfigError: Unknown name; lists the known ones and the nearest.
    """
    known = preset_names()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"preset: got {name!r}, expected one of {', '.join(known)}.{hint}")
    text = resources.files("adaattn_hf.configs").joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    return AdaAttnConfig.from_dict({"preset": name, **(yaml.safe_load(text) or {})})
