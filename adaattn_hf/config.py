"""What a user may set, and where it lives: `model.config.adaattn`, a plain dictionary that is saved with the model."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

__all__ = ["AdaAttnConfig", "ConfigError", "raw_settings", "settings_in"]

CONFIG_VERSION = 1


class ConfigError(ValueError):
    """A setting that is unknown or has a value it cannot have."""


@dataclass(frozen=True)
class AdaAttnConfig:
    """Settings of AdaAttn for one model (or one tower of a composite model).

    Attributes:
        preset: Name of the preset that these settings came from; says what was asked, decides nothing by itself.
        backend: Backend for every call, or None to choose one per kind of call. A named backend never falls back.
        budget: Relative rise of perplexity that a plan may cost (0.001 is 0.1 %); 0 is exact.
        plan: What each layer and head does, as `Plan.to_dict` writes it; None is exact attention everywhere.
        monitor: Compare sampled rows with exact attention while the model runs (plans only).
        version: Of this layout.
    """

    preset: str = "exact"
    backend: str | None = None
    budget: float = 0.0
    plan: Mapping[str, Any] | None = None
    monitor: bool = False
    version: int = CONFIG_VERSION

    def __post_init__(self) -> None:
        """Refuse values of the wrong type or range."""
        for name, kinds, expected in (
            ("preset", str, "a preset's name"),
            ("backend", (str, type(None)), "a backend's name or None"),
            (
                "plan",
                (Mapping, type(None)),
                "a plan as a dictionary (written by `adaattn calibrate`) or None",
            ),
            ("monitor", bool, "True or False"),
            ("version", int, f"{CONFIG_VERSION}"),
        ):
            value = getattr(self, name)
            if not isinstance(value, kinds):
                raise ConfigError(f"adaattn.{name}: got {value!r}, expected {expected}")
        if (
            isinstance(self.budget, bool)
            or not isinstance(self.budget, (int, float))
            or not 0 <= self.budget < 1
        ):
            raise ConfigError(
                f"adaattn.budget: got {self.budget!r}, expected a number from 0 (exact) to below 1; 0.1 % is 0.001"
            )
        if self.version != CONFIG_VERSION:
            raise ConfigError(
                f"adaattn.version: got {self.version}, this version of adaattn_hf reads {CONFIG_VERSION}; "
                "install the version of adaattn_hf that wrote the model, or delete config.adaattn"
            )
        object.__setattr__(self, "budget", float(self.budget))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AdaAttnConfig:
        """Settings from a dictionary.

        Raises:
            ConfigError: An unknown key (names the nearest known one) or a value out of range.
        """
        if not isinstance(data, Mapping):
            raise ConfigError(f"adaattn: got {type(data).__name__}, expected a mapping of settings")
        known = [f.name for f in fields(cls)]
        for key in data:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise ConfigError(f"adaattn: unknown setting {key!r}, known are {', '.join(known)}.{hint}")
        return cls(**data)

    def to_dict(self) -> dict[str, Any]:
        """What lies in `config.adaattn`; JSON-serialisable."""
        return asdict(self)


EXACT = AdaAttnConfig()
_parsed: dict[int, tuple[Any, AdaAttnConfig]] = {}
_PARSED_LIMIT = 256


def raw_settings(config: Any) -> Any:
    """What lies in `config.adaattn`, None where nothing does.

    Looks past `PretrainedConfig.__getattribute__`, which takes microseconds to miss: every layer asks.
    """
    if config is None or torch.compiler.is_compiling():
        return getattr(config, "adaattn", None)
    return object.__getattribute__(config, "__dict__").get("adaattn")


def settings_in(config: Any) -> AdaAttnConfig:
    """The settings that a model's configuration carries; exact where it carries none.

    Parsed once per dictionary object: this is asked for in every layer of every forward pass.
    """
    raw = raw_settings(config)
    if raw is None:
        return EXACT
    if torch.compiler.is_compiling():
        constant: AdaAttnConfig = _constant_settings(raw)
        return constant
    known = _parsed.get(id(raw))
    if known is not None and known[0] is raw:
        return known[1]
    settings = raw if isinstance(raw, AdaAttnConfig) else AdaAttnConfig.from_dict(raw)
    if len(_parsed) >= _PARSED_LIMIT:
        _parsed.clear()
    _parsed[id(raw)] = (raw, settings)
    return settings


@torch.compiler.assume_constant_result
def _constant_settings(raw: Any) -> AdaAttnConfig:
    """The same while a graph is traced: settings are constants of the graph."""
    return raw if isinstance(raw, AdaAttnConfig) else AdaAttnConfig.from_dict(raw)
