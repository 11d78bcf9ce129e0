"""A preset is a budget: it keeps the plan that fits it, takes away what spends more, and never is exact in silence."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

import adaattn_hf

from ..support.choices import make_choice
from ..support.models import fresh_pair, tokens
from ..support.plans import give


@pytest.mark.parametrize("preset", ["balanced", "fast", "long_context"])
def test_a_budget_without_a_plan_is_said_once(preset: str) -> None:
    model = fresh_pair("llama").ours
    with pytest.warns(UserWarning, match=f"{preset}.*every layer is exact.*adaattn calibrate"):
        adaattn_hf.configure(model, preset)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        model(input_ids=tokens())
    saved = dict(model.config.adaattn)
    other = fresh_pair("llama").ours
    other.config.adaattn = saved  # as from_pretrained leaves it
    with pytest.warns(UserWarning, match="every layer is exact"), torch.no_grad():
        other(input_ids=tokens())


def test_exact_says_nothing() -> None:
    model = fresh_pair("llama").ours
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adaattn_hf.configure(model, "exact")


def test_presets_rise_in_what_they_may_spend() -> None:
    budgets = [adaattn_hf.load_preset(name).budget for name in ("exact", "balanced", "fast")]
    assert budgets == sorted(budgets)
    assert budgets[0] == 0.0


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


def test_a_preset_takes_away_a_plan_that_spends_more() -> None:
    model = fresh_pair("llama").ours
    give(model, make_choice("window", 4))
    model.config.adaattn["plan"]["budget"] = math.log1p(0.01)
    with (
        pytest.warns(UserWarning, match="taken away"),
        pytest.warns(UserWarning, match="every layer is exact"),
    ):
        adaattn_hf.configure(model, "balanced")
    assert adaattn_hf.plan_of(model) is None


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
