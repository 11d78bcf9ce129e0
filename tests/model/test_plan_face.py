"""Plans through the face: read, checked, watched and taken out again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import adaattn_hf
from adaattn_hf.attach import weight_hash
from adaattn_hf.plan import PLAN_FORMAT, Choice, LayerPlan, Plan, PlanError

from ..support.models import assert_same, fresh_pair, tokens


def planned_pair() -> tuple[Any, Any, Plan]:
    """A stock LLaMA, and the same with a window of two tokens in its second layer."""
    stock, ours = fresh_pair("llama")
    attention = ours.model.layers[1].self_attn
    plan = Plan(
        format=PLAN_FORMAT,
        model_type="llama",
        weight_hash="",
        dtype="float32",
        adaattn="0.1.0",
        torch="2.13.0",
        transformers="5.17.0",
        budget=1e-3,
        seed=0,
        data_fingerprint="",
        protocol={},
        lengths=(64,),
        layers=(LayerPlan(1, weight_hash(attention), (Choice("window", window=2),) * 2),),
        units=(),
        verified=None,
        tensors="",
    )
    ours.config.adaattn = {"plan": plan.to_dict()}
    return stock, ours, plan


def test_a_plan_in_the_configuration_is_executed_until_it_is_removed() -> None:
    stock, ours, plan = planned_pair()
    ids = tokens()
    with torch.no_grad():
        exact = stock(input_ids=ids).logits
        assert adaattn_hf.load_plan(ours) == plan
        planned = ours(input_ids=ids).logits
        assert_same(exact[:, :2], planned[:, :2])  # the window sees all that there is
        assert float((exact - planned)[:, 2:].abs().max()) > 1e-2
        adaattn_hf.remove_plan(ours)
        assert_same(exact, ours(input_ids=ids).logits)
    assert getattr(ours.config, "adaattn", None) is None


def test_the_plan_of_a_directory_takes_the_place_of_another(tmp_path: Path) -> None:
    _, ours, plan = planned_pair()
    _, twin, _ = planned_pair()
    wider = replace(plan, layers=(replace(plan.layers[0], choices=(Choice("window", window=7),) * 2),))
    (tmp_path / "adaattn_plan.json").write_text(wider.to_json(), encoding="utf-8")
    ids = tokens()
    with torch.no_grad():
        narrow = ours(input_ids=ids).logits
        assert adaattn_hf.load_plan(ours, tmp_path) == wider
        assert float((ours(input_ids=ids).logits - narrow).abs().max()) > 1e-4
    (tmp_path / "adaattn_plan.json").unlink()
    assert adaattn_hf.load_plan(twin, tmp_path) == plan  # nothing but bases could lie there
    twin.set_attn_implementation("sdpa")
    with pytest.raises(PlanError, match=r"is sdpa, which knows no plans; .*set_attn_implementation"):
        adaattn_hf.load_plan(twin)


def test_what_is_watched_is_counted() -> None:
    _, ours, _ = planned_pair()
    with torch.no_grad(), adaattn_hf.monitoring(ours):
        ours(input_ids=tokens())
    counted = adaattn_hf.statistics(ours)
    assert [entry["activation"] for entry in counted if entry.get("layer") == 1] == [
        pytest.approx(9 / 11)
    ]  # all rows but the first two


def test_a_plan_for_other_weights_is_refused() -> None:
    _, ours, plan = planned_pair()
    ours.config.adaattn = {
        "plan": replace(plan, layers=(LayerPlan(1, "other", plan.layers[0].choices),)).to_dict()
    }
    with pytest.raises(PlanError, match="weights of layer 1 are not those"):
        adaattn_hf.load_plan(ours)


def test_a_model_without_a_plan_has_none_to_load() -> None:
    _, ours = fresh_pair("llama")
    with pytest.raises(PlanError, match="LlamaForCausalLM holds no plan; make one with `adaattn calibrate`"):
        adaattn_hf.load_plan(ours)
