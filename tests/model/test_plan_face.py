"""Plans through the face: read, checked, watched and taken out again."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import adaattn_hf
from adaattn_hf.patches.plans.attach import load_plan
from adaattn_hf.plans.plan import LayerPlan, Plan, PlanError
from adaattn_hf.plans.store import remember_tensors

from ..support.choices import make_choice
from ..support.models import assert_same, fresh_pair, tokens
from ..support.plans import give, plan_for


def planned_pair() -> tuple[Any, Any, Plan]:
    stock, ours = fresh_pair("llama")
    plan = plan_for(ours, make_choice("window", window=2), layers=(1,))
    load_plan(ours, plan)
    return stock, ours, plan


def test_a_plan_is_executed_until_it_is_removed() -> None:
    stock, ours, plan = planned_pair()
    ids = tokens()
    with torch.no_grad():
        exact = stock(input_ids=ids).logits
        assert adaattn_hf.plan_of(adaattn_hf.load_plan(ours)) == plan
        planned = ours(input_ids=ids).logits
        assert_same(exact[:, :2], planned[:, :2])  # the window sees all that there is
        assert float((exact - planned)[:, 2:].abs().max()) > 1e-2
        first, second = ours(input_ids=ids, output_attentions=True).attentions
        assert float(first[:, :, 5, :4].min()) > 0
        assert not second[:, :, 5, :4].any(), "weights are those of the plan"
        assert_same(second.sum(-1), torch.ones_like(second.sum(-1)))
        adaattn_hf.remove_plan(ours)
        assert_same(exact, ours(input_ids=ids).logits)
    assert getattr(ours.config, "adaattn", None) is None


def test_the_plan_of_a_directory_takes_the_place_of_another(tmp_path: Path) -> None:
    _, ours, plan = planned_pair()
    _, twin, _ = planned_pair()
    wider = replace(plan, layers=(replace(plan.layers[0], choices=(make_choice("window", window=7),) * 2),))
    (tmp_path / "adaattn_plan.json").write_text(wider.to_json(), encoding="utf-8")
    ids = tokens()
    with torch.no_grad():
        narrow = ours(input_ids=ids).logits
        assert adaattn_hf.plan_of(adaattn_hf.load_plan(ours, tmp_path)) == wider
        assert float((ours(input_ids=ids).logits - narrow).abs().max()) > 1e-4
    (tmp_path / "adaattn_plan.json").unlink()
    for wrong, said in (
        (tmp_path, "holds no plan"),
        (tmp_path / "mistyped", "does not exist"),
        (tmp_path / "mistyped" / "adaattn_plan.json", "does not exist"),
    ):
        with pytest.raises(PlanError, match=f"{said}; expected a plan, or a directory or"):
            adaattn_hf.load_plan(twin, wrong)
    assert adaattn_hf.plan_of(adaattn_hf.load_plan(twin)) == plan  # the one that the model carries
    twin.set_attn_implementation("sdpa")
    with pytest.raises(PlanError, match=r"is 'sdpa', not one of AdaAttn's; .*set_attn_implementation"):
        adaattn_hf.load_plan(twin)


def test_a_file_that_is_no_plan_is_named(tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("Call me Ishmael.", encoding="utf-8")
    with pytest.raises(PlanError, match=r"book\.txt: the plan is not JSON.*expected the adaattn_plan\.json of"):
        adaattn_hf.load_plan(planned_pair()[1], book)


def test_a_plan_of_another_kind_of_model_names_both_and_an_early_exit_names_the_layers() -> None:
    _, ours, plan = planned_pair()
    gpt2 = fresh_pair("gpt2").ours
    give(gpt2, make_choice("window", window=2))
    for model, name in ((ours, "num_hidden_layers"), (gpt2, "n_layer")):
        with pytest.raises(PlanError, match=rf"{name}: .* with 2, this one has 1; .* \(assistant_early_exit\?\)"):
            model.generate(tokens(1), max_new_tokens=2, do_sample=False, assistant_early_exit=1)
    with pytest.raises(PlanError, match=r"a plan of llama; \S+ is another model \(model type llama there, gpt2 here\)"):
        load_plan(fresh_pair("gpt2").ours, plan)


def test_what_is_watched_is_counted() -> None:
    _, ours, _ = planned_pair()
    with torch.no_grad(), adaattn_hf.monitoring(ours):
        ours(input_ids=tokens())
    shares = [entry["activation"] for entry in adaattn_hf.statistics(ours) if entry.get("layer") == 1]
    assert shares == [pytest.approx(9 / 11)]  # all rows but the first two


def test_a_model_without_a_plan_has_none_to_load() -> None:
    _, ours = fresh_pair("llama")
    with pytest.raises(PlanError, match="LlamaForCausalLM holds no plan; make one with `adaattn calibrate`"):
        adaattn_hf.load_plan(ours)


@torch.no_grad()
@pytest.mark.parametrize("change", ["step", "load", "assign", "cast", "wrap"])
def test_changes_of_weights_after_the_first_call_are_noticed(change: str) -> None:
    _, ours, _ = planned_pair()
    other = fresh_pair("llama")[0]
    ours(input_ids=tokens())
    attention = ours.model.layers[1].self_attn
    if change == "step":
        attention.q_proj.weight.add_(0.1)
    elif change in ("load", "assign"):
        weights = {name: value + 0.1 for name, value in other.state_dict().items()}
        ours.load_state_dict(weights, assign=change == "assign")
    elif change == "cast":
        ours.to(torch.bfloat16)
    else:
        attention.q_proj = torch.nn.Sequential(attention.q_proj)
    with pytest.raises(PlanError, match=r"not those that the plan|calibrated in float32"):
        ours(input_ids=tokens())


def test_layers_and_tensors_that_do_not_fit_are_refused_by_name() -> None:
    _, ours, plan = planned_pair()

    def refused(layers: tuple[LayerPlan, ...], match: str, **tensors: torch.Tensor) -> None:
        name = remember_tensors({f"layers.1.{key.replace('__', '.')}": value for key, value in tensors.items()})
        with pytest.raises(PlanError, match=match):
            adaattn_hf.load_plan(ours, replace(plan, layers=layers, tensors=name))

    own = plan.layers[0]
    refused((own, replace(own, layer=99)), "has a layer 99")
    ranked = (replace(own, choices=(make_choice(rank=2),) * 2),)
    refused(ranked, "needs its query_basis")
    refused(ranked, "query_basis of head 0", query_basis__0=torch.zeros(3, 2), key_basis__0=torch.zeros(3, 2))
    rounded = (replace(own, choices=(make_choice(precision="int8"),) * 2),)
    refused(rounded, "key_mean is", key_mean=torch.zeros(2, 2))
    refused(rounded, "key_mean is", key_mean=torch.zeros(1, 1))


@pytest.mark.parametrize("big", [2**31, 2**63, 10**30])
def test_numbers_beyond_the_kernels_integers_are_refused(big: int) -> None:
    with pytest.raises(PlanError, match="expected an integer from 1 to 2147483647"):
        make_choice("window", big)
    with pytest.raises(PlanError, match="expected an integer from 0 to 2147483647"):
        make_choice("window", 8, big)
