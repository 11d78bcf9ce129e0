"""What a user may set, and where it lives: `model.config.adaattn`, a plain dictionary that is saved with the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from .errors import unknown, warn

CONFIG_VERSION = 1
BUDGETS = {"balanced": 0.001, "exact": 0.0, "fast": 0.01, "long_context": 0.001}
"""Budgets of the presets by name, as in their files, `configs/*.yaml`, which the kernels of the Hub do not have."""


class ConfigError(ValueError):
    """A setting that is unknown or has a value it cannot have."""


@dataclass(frozen=True)
class AdaAttnConfig:
    """Settings of AdaAttn for one model (or one tower of a composite model).

    Attributes:
        preset: Name of the preset that these settings came from; it sets nothing by itself.
        backend: Backend for every call, or None to choose one per kind of call. A named backend never falls back.
        budget: Relative rise of perplexity that a plan may cost (0.001 is 0.1 %): one made for more is refused. 0 sets
            no limit. A budget buys nothing without a plan, and the model says so once.
        plan: What each layer and head does, as `Plan.to_dict` writes it; None is exact attention everywhere.
        tensors: Bases and means of the plan, as base64 of their safetensors file, which so travel with the plan; None
            where they lie in a file beside the weights alone.
        monitor: Compare sampled rows with exact attention while the model runs (plans only).
        version: Of this layout.
    """

    preset: str = "exact"
    backend: str | None = None
    budget: float = 0.0
    plan: Mapping[str, Any] | None = None
    tensors: str | None = None
    monitor: bool = False
    version: int = CONFIG_VERSION

    def __post_init__(self) -> None:
        number = isinstance(self.budget, (int, float))
        for name, fits, expected in (
            ("preset", isinstance(self.preset, str), "a preset's name"),
            ("backend", isinstance(self.backend, str | None), "a backend's name or None"),
            ("plan", isinstance(self.plan, Mapping | None), "a plan as `adaattn calibrate` writes it, or None"),
            ("monitor", isinstance(self.monitor, bool), "True or False"),
            ("tensors", isinstance(self.tensors, str | None), "base64 of a plan's tensors or None"),
            ("version", isinstance(self.version, int), f"{CONFIG_VERSION}"),
            ("budget", number and 0 <= self.budget < 1, "a number from 0 (no limit) to below 1; 0.1 % is 0.001"),
        ):
            value = getattr(self, name)
            if not fits or (isinstance(value, bool) and name != "monitor"):
                raise ConfigError(f"adaattn.{name}: got {value!r}, expected {expected}")
        if self.version != CONFIG_VERSION:
            raise ConfigError(
                f"adaattn.version: got {self.version}, this version of adaattn_hf reads {CONFIG_VERSION}; "
                "install the version of adaattn_hf that wrote the model, or delete config.adaattn"
            )
        object.__setattr__(self, "budget", float(self.budget))
        if self.preset not in BUDGETS:
            raise ConfigError(unknown("preset", self.preset, BUDGETS))
        may_spend = BUDGETS[self.preset]
        if may_spend and not self.budget:
            raise ConfigError(
                f"adaattn.preset: got {self.preset!r} with a budget of 0, expected the settings of that preset, whose "
                f"budget is {may_spend:g}; to set them by name, call adaattn_hf.configure(model, {self.preset!r})"
            )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AdaAttnConfig:
        """Settings from a dictionary.

        Raises:
            ConfigError: An unknown key (names the nearest known one) or a value out of range.
        """
        if not isinstance(data, Mapping):
            raise ConfigError(
                f"config.adaattn: got {type(data).__name__}, expected a mapping of settings; "
                "adaattn_hf.configure(model, adaattn_hf.AdaAttnConfig(...)) writes one, and also takes a preset's name"
            )
        if "unverified" in data:
            raise ConfigError(
                f"adaattn.unverified: got {data['unverified']!r:.60}, expected no such setting: no file "
                "lets an unverified plan run; delete it, and call "
                "adaattn_hf.load_plan(model, unverified=True) in each process"
            )
        known = [f.name for f in fields(cls)]
        for key in data:
            if key not in known:
                raise ConfigError(unknown("setting of config.adaattn", str(key), known))
        return cls(**data)

    def to_dict(self) -> dict[str, Any]:
        """What lies in `config.adaattn`; JSON-serialisable."""
        return asdict(self)


EXACT = AdaAttnConfig()
_parsed: dict[int, tuple[Any, Any, AdaAttnConfig]] = {}
_PARSED_LIMIT = 256


def raw_settings(config: Any) -> Any:
    """What lies in `config.adaattn`, None where nothing does.

    Looks past `PretrainedConfig.__getattribute__`, which takes microseconds to miss: every layer asks.
    """
    if config is None or torch.compiler.is_compiling():
        return getattr(config, "adaattn", None)
    return object.__getattribute__(config, "__dict__").get("adaattn")


def settings_in(config: Any) -> AdaAttnConfig:
    """The settings that a model's configuration carries; exact where it carries none."""
    raw = raw_settings(config)
    return EXACT if raw is None else settings_of(raw)


def settings_of(raw: Any, bound: bool = False) -> AdaAttnConfig:
    """The settings in what lies in `config.adaattn`; parsed once per dictionary and change of a value.

    A plan is `bound` to the model, so that none is missing: one that it is trained under is not in its configuration.
    """
    if torch.compiler.is_compiling():
        # without the plan: a graph that holds it would be guarded by each of its numbers
        rest = {name: value for name, value in raw.items() if name not in ("plan", "tensors")}
        constant: AdaAttnConfig = _constant_settings(rest)
        return constant
    cached = _parsed.get(id(raw))
    if cached is not None and cached[0] is raw and cached[1] == raw:
        return cached[2]
    settings = AdaAttnConfig.from_dict(raw)
    if len(_parsed) >= _PARSED_LIMIT:
        _parsed.clear()
    # a copy of the top level: whoever sets `config.adaattn["monitor"]` in place is heard
    _parsed[id(raw)] = (raw, dict(raw), settings)
    if settings.plan is None and (settings.budget > 0 or settings.monitor or settings.tensors) and not bound:
        percent, asks = "0.1", "monitor is to watch a plan" if settings.monitor else "tensors belong to a plan"
        if settings.budget > 0:
            percent = f"{100 * settings.budget:g}"
            who = "config.adaattn" if settings.preset == "exact" else f"the preset {settings.preset!r}"
            asks = f"{who} may spend a budget of {percent} %"
        warn(
            f"adaattn: {asks}, but the model carries no plan: every layer is exact. Make one with `adaattn calibrate "
            f"MODEL --data FILES --budget {percent}%`, or silence this with adaattn_hf.configure(model, 'exact')"
        )
    return settings


@torch.compiler.assume_constant_result
def _constant_settings(raw: Any) -> AdaAttnConfig:
    """The same while a graph is traced: settings are constants of the graph."""
    return AdaAttnConfig.from_dict(raw)
