"""Settings that nobody would read, or that would do nothing, are refused with the remedy."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import adaattn_hf
from adaattn_hf import AdaAttnConfig, ConfigError

from ..support.choices import make_choice
from ..support.models import fresh_pair, tokens
from ..support.plans import plan_for


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"preset": "fast"}, r"got 'fast' with a budget of 0.*whose budget is 0\.01.*configure\(model, 'fast'\)"),
        ({"preset": "long_context", "monitor": True}, "got 'long_context' with a budget of 0"),
        ({"preset": "nonsense"}, "preset: got 'nonsense', expected one of balanced, exact, fast, long_context"),
        ({"preset": "fasd", "budget": 0.1}, "Did you mean 'fast'"),
        ({"mismatch": "warn"}, "got 'warn' without a shadow.*set adaattn.shadow"),
        ({"unverified": True}, r"expected no such setting: no file.*load_plan\(model, unverified=True\)"),
        ({"unverified": False}, "expected no such setting"),
        ("fast", r"got str, expected a mapping of settings; adaattn_hf.configure\(model, settings\)"),
        (AdaAttnConfig(), "got AdaAttnConfig, expected a mapping"),
    ],
    ids=str,
)  # fmt: skip
def test_a_setting_without_effect_says_so_when_the_model_runs(settings: Any, says: str) -> None:
    model = fresh_pair("llama").ours
    model.config.adaattn = settings
    with pytest.raises(ConfigError, match=says):
        model(input_ids=tokens())


def test_the_same_settings_are_refused_where_they_are_made() -> None:
    with pytest.raises(ConfigError, match="with a budget of 0"):
        AdaAttnConfig(preset="fast")
    with pytest.raises(ConfigError, match="preset: got 'nonsense'"):
        AdaAttnConfig(preset="nonsense", budget=0.1)


@pytest.mark.parametrize("name", adaattn_hf.preset_names())
def test_presets_are_settings(name: str) -> None:
    preset = adaattn_hf.load_preset(name)
    assert AdaAttnConfig.from_dict(preset.to_dict()) == preset
    assert preset.preset == name


def test_a_monitor_without_a_plan_to_watch_is_said_once() -> None:
    model = fresh_pair("llama").ours
    model.config.adaattn = {"monitor": True}
    with pytest.warns(UserWarning, match="monitor is to watch a plan, but the model carries no plan"):
        model(input_ids=tokens())
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        model(input_ids=tokens())


def test_settings_with_an_effect_are_kept() -> None:
    model = fresh_pair("llama").ours
    plan = plan_for(model, make_choice("window", window=2))
    for settings in (
        {},
        {"shadow": 1, "mismatch": "warn"},
        {"preset": "fast", "budget": 0.01, "plan": plan.to_dict()},
    ):
        model.config.adaattn = settings
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("error")
            model(input_ids=tokens())
