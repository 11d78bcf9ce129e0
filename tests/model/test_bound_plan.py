"""A plan is bound to a model by one act, and goes where the model goes: copies, pickles, stages, other models."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import adaattn_hf
from adaattn_hf.patches.plans.bound import bound_plan
from adaattn_hf.plans.plan import PlanError

from ..support.choices import make_choice
from ..support.models import checkpointed, fresh_pair, logits
from ..support.plans import give, plan_for, said, stepped

pytestmark = pytest.mark.usefixtures("heard")
WINDOW = make_choice("window", window=2)


def planned(**fields: Any) -> Any:
    model = fresh_pair("llama", **{"num_hidden_layers": 3, **fields}).ours
    give(model, WINDOW)
    return model


def exact() -> torch.Tensor:
    return logits(fresh_pair("llama", num_hidden_layers=3).ours)


def test_a_checkpoint_with_a_plan_is_exact_until_the_plan_is_bound(
    tmp_path: Path, heard: pytest.LogCaptureFixture
) -> None:
    model = planned()
    right = logits(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="adaattn").eval()
    assert adaattn_hf.plan_of(loaded) is None
    for _ in range(2):
        assert torch.equal(logits(loaded), exact())
    assert said(heard, "adaattn_hf.load_plan(model)") == 1
    assert torch.equal(logits(adaattn_hf.load_plan(loaded)), right)
    assert not torch.equal(right, exact())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"])
def test_a_copy_has_a_bound_plan_of_its_own(copied: Any) -> None:
    model = planned()
    right = logits(model)
    twin = copied(model)
    own, other = bound_plan(model), bound_plan(twin)
    assert own is not None
    assert other is not None
    assert own is not other
    assert torch.equal(logits(twin), right)
    assert set(other.layers) == {layer.self_attn for layer in twin.model.layers}
    assert other.configs[0] is twin.config
    stepped(twin)
    assert (other.state, own.state) == ("trained", "as verified")
    assert "plan" in model.config.adaattn
    assert "plan" not in twin.config.adaattn
    assert torch.equal(logits(model), right)


def test_a_layer_that_is_computed_again_for_gradients_is_served() -> None:
    model = planned()
    model.requires_grad_(False)
    hidden, layer = torch.randn(1, 5, model.config.hidden_size, requires_grad=True), model.model.layers[0]
    at = model.model.rotary_emb(hidden, torch.arange(5)[None])

    def run(states: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = layer(states, position_embeddings=at)
        return out

    for reentrant in (False, True):
        checkpoint(run, hidden, use_reentrant=reentrant).sum().backward()
    assert hidden.grad is not None
    assert torch.isfinite(hidden.grad).all()


def test_a_copy_of_a_trained_model_is_trained_with_checkpoints() -> None:
    twin = copy.deepcopy(stepped(planned()))
    checkpointed(twin, reentrant=False)
    stepped(twin)
    bound = bound_plan(twin)
    assert bound is not None
    assert bound.state == "trained"


def test_a_stage_of_a_pipeline_runs_its_layers_and_a_model_that_lost_some_does_not() -> None:
    model, rest, last = planned(), planned(), fresh_pair("llama", num_hidden_layers=3).ours
    last.model.layers[0].mlp.act_fn = nn.LeakyReLU(0.1)
    give(last, WINDOW)
    last.model.layers[0].mlp.act_fn = nn.LeakyReLU(0.9)
    with pytest.raises(PlanError, match=r"layers.0.mlp.act_fn.*slope=0.1\).*slope=0.9\)"):
        logits(last)
    model.model.layers = model.model.layers[:2]
    model.model.norm = nn.Identity()
    assert torch.isfinite(logits(model)).all()
    last.model.layers, last.model.embed_tokens = last.model.layers[1:], None  # the first now has another activation
    with torch.no_grad():
        assert torch.isfinite(last(inputs_embeds=torch.randn(1, 5, last.config.hidden_size)).logits).all()
    rest.model.layers = rest.model.layers[:2]
    with pytest.raises(PlanError, match="layers moved"):
        logits(rest)


def test_a_planned_model_that_runs_stock_attention_is_not_compared() -> None:
    model = planned()
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.01)
    for one in (model, copy.deepcopy(model)):
        assert torch.isfinite(logits(one)).all()
    model.set_attn_implementation("adaattn")
    with pytest.raises(PlanError, match="weights of the model are not those"):
        logits(model)


def test_a_block_of_the_models_own_plan_and_one_beside_it_share_a_door() -> None:
    model = planned()
    right, own = logits(model), adaattn_hf.plan_of(model)
    wide = plan_for(model, make_choice("window", window=7))
    for _ in range(3):
        with adaattn_hf.use_plan(model, own):
            assert torch.equal(logits(model), right)
        with adaattn_hf.use_plan(model, wide):
            assert not torch.equal(logits(model), right)
    assert len(model.model._forward_pre_hooks) == 2
    with adaattn_hf.use_plan(model, None):
        assert torch.equal(logits(model), exact())
    assert torch.equal(logits(model), right)


def test_a_plan_is_refused_before_anything_of_the_model_has_changed() -> None:
    model = planned()
    right = logits(model)
    with pytest.raises(PlanError, match="was never verified"):
        adaattn_hf.load_plan(model, plan_for(model, make_choice("window", window=7), verified=None))
    assert torch.equal(logits(model), right)
