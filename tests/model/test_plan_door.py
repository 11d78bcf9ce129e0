"""A plan is bound to a model by one act; what changes behind its check, whatever it is, the next pass says."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
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
from ..support.models import fresh_pair, logits
from ..support.plans import give, plan_for, said, stepped

Change = Callable[[Any], Any]


pytestmark = pytest.mark.usefixtures("heard")
NARROW = make_choice("window", window=2)


def planned(family: str = "llama", **fields: Any) -> Any:
    model = fresh_pair(family, **{"num_hidden_layers": 3, **fields}).ours
    give(model, NARROW)
    return model


def checked(family: str = "llama", **fields: Any) -> Any:
    """A planned model behind its first pass."""
    model = planned(family, **fields)
    logits(model)
    return model


def swapped_in_place(layers: Any) -> None:
    layers.insert(0, layers.pop(1))


MOVES: dict[str, Change] = {
    "swapped in place": swapped_in_place,
    "swapped by index": lambda layers: (
        first := layers[0], layers.__setitem__(0, layers[1]), layers.__setitem__(1, first),
    ),
    "swapped in the dictionary": lambda layers: layers._modules.update({"0": layers[1], "1": layers[0]}),
    "the first dropped": lambda layers: layers.pop(0),
    "one between dropped": lambda layers: layers.__delitem__(1),
    "the last dropped": lambda layers: layers.pop(2),
    "appended again": lambda layers: layers.append(layers[0]),
    "inserted again": lambda layers: layers.insert(1, layers[0]),
}  # fmt: skip


@pytest.mark.parametrize("move", MOVES)
def test_layers_in_other_places_are_refused(move: str) -> None:
    model = checked()
    MOVES[move](model.model.layers)
    for _ in range(2):
        with pytest.raises(PlanError, match=r"weights of the model are not those .*layers moved"):
            logits(model)


def test_what_was_put_back_runs() -> None:
    model = checked()
    right = logits(model)
    swapped_in_place(model.model.layers)
    with pytest.raises(PlanError, match="layers moved"):
        logits(model)
    swapped_in_place(model.model.layers)
    assert torch.equal(logits(model), right)


@pytest.mark.parametrize("whole", [True, False], ids=["a layer", "its attention"])
@pytest.mark.parametrize("theirs", [True, False], ids=["planned too", "without a plan"])
def test_a_layer_in_another_model_is_refused(theirs: bool, whole: bool) -> None:
    model, other = checked(), checked()
    if not theirs:
        adaattn_hf.remove_plan(other)
    if whole:
        other.model.layers[0] = model.model.layers[0]
    else:
        other.model.layers[0].self_attn = model.model.layers[0].self_attn
    with pytest.raises(PlanError, match=r"layer 0 runs in another model|weights of the model are not those"):
        logits(other)
    logits(model)


def test_a_layer_runs_by_itself() -> None:
    model = checked()
    hidden, layer = torch.randn(1, 5, model.config.hidden_size), model.model.layers[0]
    at = model.model.rotary_emb(hidden, torch.arange(5)[None])
    with torch.no_grad():
        right = layer(hidden, position_embeddings=at)
        layer.mlp.up_proj.weight.add_(1.0)
        with pytest.raises(PlanError, match="weights of the model"):
            layer(hidden, position_embeddings=at)
    assert torch.isfinite(right).all()


def in_place(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(2)


SETTINGS: dict[str, tuple[str, Change]] = {
    "sliding_window": ("mistral-window", lambda model: setattr(model.config, "sliding_window", 3)),
    "rope_parameters": ("llama", lambda model: model.config.rope_parameters.update(rope_theta=5.0)),
    "rms_norm_eps": ("llama", lambda model: setattr(model.config, "rms_norm_eps", 0.1)),
    r"inv_freq \[\d+\]": ("llama", in_place),
    r"rotary_emb.inv_freq \[\d+\]": ("llama", lambda model: setattr(model.model.rotary_emb, "inv_freq", torch.ones(4))),
    "layers.1.mlp.act_fn": ("llama", lambda model: setattr(model.model.layers[1].mlp, "act_fn", torch.nn.ReLU())),
    "rotary_emb.attention_scaling": ("llama", lambda model: setattr(model.model.rotary_emb, "attention_scaling", 2.0)),
    **{
        f"layers.1.self_attn.{name}": ("llama", lambda model, name=name, value=value:
                                       setattr(model.model.layers[1].self_attn, name, value))
        for name, value in (("scaling", 1.0), ("num_key_value_groups", 1), ("is_causal", False), ("layer_idx", 0))
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_attention_reads_are_refused_by_name(name: str) -> None:
    family, change = SETTINGS[name]
    model = checked(family)
    change(model)
    for read in (logits, logits, adaattn_hf.load_plan):
        words = f"{name}: the plan was verified for a model with .*, this one has .*undo"
        with pytest.raises(PlanError, match=f"{words}|both are layer 0|made for 2 key/value"):
            read(model)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_a_pass_sets_by_its_length_are_no_change(kind: str) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}
    model = checked(rope_parameters=rope, max_position_embeddings=64 if kind == "dynamic" else 256, head_dim=8)
    frequencies = model.model.rotary_emb.inv_freq.clone()
    right = logits(model)
    with torch.no_grad():
        model(torch.ones(1, 100, dtype=torch.long))
    assert not torch.equal(model.model.rotary_emb.inv_freq, frequencies)
    assert torch.equal(logits(model), right)


def test_weights_outside_attention_are_compared_in_every_pass() -> None:
    for name in ("model.embed_tokens", "model.layers.2.mlp.up_proj", "model.norm"):
        model = checked()
        with torch.no_grad():
            model.get_submodule(name).weight.mul_(1.5)
        with pytest.raises(PlanError, match="weights of the model are not those"):
            logits(model)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"])
def test_copies_run_the_plan_and_notice_for_themselves(copied: Change) -> None:
    model = checked()
    right = logits(model)
    twin = copied(model)
    own, other = bound_plan(model), bound_plan(twin)
    assert own is not None
    assert other is not None
    assert own is not other
    assert torch.equal(logits(twin), right)
    assert set(other.layers) == {layer.self_attn for layer in twin.model.layers}
    assert other.configs[0] is twin.config
    swapped_in_place(twin.model.layers)
    with pytest.raises(PlanError, match="layers moved"):
        logits(twin)
    swapped_in_place(twin.model.layers)
    stepped(twin)
    assert (other.state, own.state) == ("trained", "as verified")
    assert ("plan" in model.config.adaattn, "plan" in twin.config.adaattn) == (True, False)
    assert torch.equal(logits(model), right)
    edited = copied(model)
    in_place(edited)  # before its first pass
    with pytest.raises(PlanError, match="inv_freq"):
        logits(edited)
    layer = copied(model.model.layers[1])
    assert sum(isinstance(one, type(layer)) for one in gc.get_referents(vars(layer.self_attn))) == 0


def test_a_planned_model_dies_without_the_collector_and_a_door_goes_with_its_plan() -> None:
    model = checked()
    trunk = weakref.ref(model.model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert trunk() is None
    finally:
        gc.enable()
    model = checked()
    adaattn_hf.remove_plan(model)
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in model.modules())


def test_a_pass_that_fails_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    model = checked()
    monkeypatch.setattr(model.model.norm, "forward", len)
    with pytest.raises(TypeError, match="subscriptable"):
        logits(model)
    bound = bound_plan(model)
    assert bound is not None
    assert not bound.threads


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


def test_a_stage_of_a_pipeline_runs_its_layers_and_a_model_that_lost_some_does_not() -> None:
    model, rest, last = planned(), planned(), fresh_pair("llama", num_hidden_layers=3).ours
    last.model.layers[0].mlp.act_fn = nn.LeakyReLU(0.1)
    give(last, NARROW)
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


def test_a_stage_whose_weights_are_written_and_stay_the_same_runs_on() -> None:
    """Torch 2.15 puts the buffers of a stage back behind a first pass; `stage.to(device)` moves all its weights."""
    found: list[torch.Tensor] = []
    with torch.no_grad():
        for runs_before in (True, False):
            model = planned()
            model.model.layers, model.model.norm = model.model.layers[:2], nn.Identity()
            found += [logits(model)] if runs_before else []
            for buffer in model.model.buffers():
                buffer.copy_(buffer.clone())
            found.append(logits(model))
            model.model._apply(torch.clone)
            found.append(logits(model))
        assert all(torch.equal(each, found[0]) for each in found)
        model.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    with pytest.raises(PlanError, match="weights of the model are not those"):
        logits(model)


def test_layers_that_stand_for_others_and_norms_that_do_not_come_back_are_no_stage() -> None:
    moved, gpt2 = planned(), fresh_pair("gpt2").ours
    logits(moved)
    moved.model.layers, moved.model.embed_tokens = copy.deepcopy(moved.model.layers[1:]), None
    for index, layer in enumerate(moved.model.layers):
        layer.self_attn.layer_idx = index
    with pytest.raises(PlanError, match="weights of layer 0 are not those"):
        moved(inputs_embeds=torch.randn(1, 5, moved.config.hidden_size))
    give(gpt2, NARROW)
    logits(gpt2)
    gpt2.transformer.h, gpt2.transformer.ln_f = copy.deepcopy(gpt2.transformer.h[:1]), nn.Identity()
    gpt2.transformer.h[0].ln_1 = nn.Sequential(gpt2.transformer.h[0].ln_1, nn.ReLU())
    with pytest.raises(PlanError, match="weights of the model are not those"):
        logits(gpt2)


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
