"""Settings without effect are refused with the remedy; a preset is a budget, which a plan fits or is taken away for."""

import math
import warnings
from typing import Any

import pytest
import torch

import adaattn_hf
from adaattn_hf import AdaAttnConfig, ConfigError, PlanError
from adaattn_hf.calibration.pricing import machine
from adaattn_hf.config import BUDGETS

from ..support.choices import make_choice
from ..support.models import fresh_pair, tokens
from ..support.plans import give, plan_for


@pytest.mark.parametrize(("settings", "says"), [
    ({"preset": "fast"}, r"got 'fast' with a budget of 0.*whose budget is 0\.01.*configure\(model, 'fast'\)"),
    ({"preset": "long_context", "monitor": True}, "got 'long_context' with a budget of 0"),
    ({"preset": "nonsense"}, "preset: got 'nonsense', expected one of balanced, exact, fast, long_context"),
    ({"preset": "fasd", "budget": 0.1}, "Did you mean 'fast'"),
    ({"unverified": True}, r"expected no such setting: no file.*load_plan\(model, unverified=True\)"),
    ({"unverified": False}, "expected no such setting"),
    (AdaAttnConfig(), "got AdaAttnConfig, expected a mapping"),
], ids=str)  # fmt: skip
def test_a_setting_without_effect_says_so_when_the_model_runs(settings: Any, says: str) -> None:
    model = fresh_pair("llama").ours
    model.config.adaattn = settings
    with pytest.raises(ConfigError, match=says):
        model(input_ids=tokens())


def test_presets_are_settings_and_rise_in_what_they_may_spend() -> None:
    presets = [adaattn_hf.load_preset(name) for name in adaattn_hf.preset_names()]
    assert {preset.preset: preset.budget for preset in presets} == BUDGETS
    assert all(AdaAttnConfig.from_dict(preset.to_dict()) == preset for preset in presets)
    balanced, exact, fast, _ = presets
    assert 0.0 == exact.budget < balanced.budget < fast.budget


@pytest.mark.parametrize(("settings", "says"), [
    ({"monitor": True}, "monitor is to watch a plan, but the model carries no plan"),
    ({"budget": 0.01}, r"config\.adaattn may spend a budget of 1 %, but the model carries no plan"),
    ({"tensors": "xx"}, "tensors belong to a plan, but the model carries no plan"),
], ids=str)  # fmt: skip
def test_what_only_a_plan_can_use_is_said_once(settings: Any, says: str) -> None:
    model = fresh_pair("llama").ours
    model.config.adaattn = settings
    with pytest.warns(UserWarning, match=says):
        model(input_ids=tokens())
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        model(input_ids=tokens())


def test_settings_with_an_effect_are_kept() -> None:
    model = fresh_pair("llama").ours
    plan = plan_for(model, make_choice("window", window=2))
    for settings in ({}, {"backend": "sdpa"}, {"preset": "fast", "budget": 0.01, "plan": plan.to_dict()}):
        model.config.adaattn = settings
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("error")
            model(input_ids=tokens())
            adaattn_hf.configure(model, "exact")  # which has no plan, and says nothing


@pytest.mark.parametrize("preset", ["balanced", "fast", "long_context"])
def test_a_budget_without_a_plan_is_said_once_at_the_users_line(preset: str) -> None:
    model = fresh_pair("llama").ours
    with pytest.warns(UserWarning, match=f"{preset}.*every layer is exact.*adaattn calibrate") as asked:
        adaattn_hf.configure(model, preset)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        model(input_ids=tokens())
    saved = dict(model.config.adaattn)
    other = fresh_pair("llama").ours
    other.config.adaattn = saved  # as from_pretrained leaves it
    with pytest.warns(UserWarning, match="every layer is exact") as ran, torch.no_grad():
        other(input_ids=tokens())
    assert [one.filename for one in (*asked, *ran)] == [__file__, __file__]
    assert asked[0].lineno < ran[0].lineno


def test_a_preset_keeps_the_plan_that_fits_it() -> None:
    model = fresh_pair("llama").ours
    plan = give(model, make_choice("window", 4))  # made for 1e-3 nats/token
    with torch.no_grad():
        planned = model(input_ids=tokens()).logits
        adaattn_hf.configure(model, "fast")
        assert torch.equal(model(input_ids=tokens()).logits, planned)
        assert adaattn_hf.plan_of(model) == plan
        adaattn_hf.configure(model, "exact")
        assert adaattn_hf.plan_of(model) is None
        assert not torch.equal(model(input_ids=tokens()).logits, planned)


def test_a_preset_takes_away_a_plan_that_spends_more_and_refuses_it_from_then_on() -> None:
    model = fresh_pair("llama").ours
    plan = give(model, make_choice("window", 4), budget=math.log1p(0.01))
    with pytest.warns(UserWarning, match="taken away") as told, pytest.warns(UserWarning, match="every layer is exact"):
        adaattn_hf.configure(model, "balanced")
    assert {one.filename for one in told} == {__file__}
    with pytest.raises(PlanError, match=r"got a plan for \+1 %.*at most \+0.1 %.*--budget 0.1%"):
        adaattn_hf.load_plan(model, plan)
    assert adaattn_hf.plan_of(model) is None
    adaattn_hf.configure(model, "exact")
    assert adaattn_hf.plan_of(adaattn_hf.load_plan(model, plan)) == plan, "0 sets no limit"


def test_a_plan_priced_on_another_machine_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model, here = fresh_pair("llama").ours, machine(torch.device("cpu"))
    for other, priced in enumerate((here, f"another processor (avx2), {here.split(', ', 1)[1]}")):
        give(model, make_choice("window", 4), protocol={"machine": priced})
        assert ("times that were measured on another processor (avx2), " in caplog.text) == bool(other)


def test_the_explanation_shows_the_plan() -> None:
    model = fresh_pair("llama").ours
    assert "plan:" not in str(adaattn_hf.explain(model))
    give(model, make_choice("window", 4), layers=(1,))
    text = str(adaattn_hf.explain(model))
    assert text.count("plan: ") == 3  # prefill, padded and decode of one layer
    assert "on key/value heads 0, 1" in text
    assert text.count("w4+0: the last 4 keys") == 1
    by_layer = {choice.layer: choice.plan for choice in adaattn_hf.explain(model).layers}
    assert [bool(plan) for plan in by_layer.values()] == [False, True]
