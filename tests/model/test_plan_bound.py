"""What a plan is bound to: weights that adapters wrap and merge, settings of the model, dtypes, and this process."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import adaattn_hf
from adaattn_hf.patches.plans.attach import load_plan
from adaattn_hf.patches.plans.bound import bound_plan
from adaattn_hf.patches.plans.hashes import model_hash
from adaattn_hf.plans.plan import PlanError

from ..support.choices import make_choice
from ..support.models import InBuffers, checkpointed, config_of, fresh_pair, logits, tokens
from ..support.plans import PROVEN, give, lora, plan_for, said, stepped
from ..support.versions import needs_tracing
from .test_plugin_load import composite, composite_inputs

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of peft's and Transformers' old names
    pytest.mark.usefixtures("heard"),
]
WINDOW = 2


def planned(family: str = "llama") -> Any:
    model = fresh_pair(family).ours
    give(model, make_choice("window", window=WINDOW))
    return model


@pytest.mark.parametrize("loaded", ["before", "after"])
@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("gate_proj",)], ids=["attention", "elsewhere"])
def test_a_wrapped_model_runs_its_plan_and_what_is_not_covered_is_said_once(
    loaded: str, targets: tuple[str, ...], heard: pytest.LogCaptureFixture
) -> None:
    model = planned()
    right = logits(planned())
    if loaded == "before":
        logits(model)
    wrapped = lora(model, *targets)
    if loaded == "after":
        adaattn_hf.load_plan(wrapped)
    assert torch.equal(logits(wrapped), right)  # B is 0
    with torch.no_grad():
        for name, weight in wrapped.named_parameters():
            if "lora_B" in name:
                weight.add_(0.5)
    assert not torch.equal(logits(wrapped), right)
    assert said(heard, "the model has adapters") == 1


def test_parts_that_are_wrapped_or_belong_to_others_are_not_checked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    from adaattn_hf.patches.plans import check

    model = planned()
    logits(model)
    hashed: list[Any] = []
    monkeypatch.setattr(check, "model_hash", hashed.append)
    model.model.layers[0].mlp = torch.nn.Sequential(model.model.layers[0].mlp)
    model.model.norm = model.model.norm
    other = torch.nn.Sequential(torch.nn.Linear(2, 2))
    other[0] = torch.nn.Linear(2, 2)
    logits(model)
    model.model.layers = model.model.layers[:1]  # as a stage of a pipeline keeps
    model.model.norm = torch.nn.Identity()
    logits(model)
    assert hashed == []


@pytest.mark.parametrize("where", ["k_proj", "up_proj"])
def test_weights_in_buffers_are_bound_and_watched(where: str) -> None:
    model = fresh_pair("llama").ours
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, child in list(part.named_children()):
                if isinstance(child, torch.nn.Linear):
                    setattr(part, name, InBuffers(child))
    give(model, make_choice("window", window=WINDOW))
    logits(model)
    layer = model.model.layers[1]
    (layer.self_attn if where == "k_proj" else layer.mlp).get_submodule(where).packed[0, 0] += 1
    which = "the model" if where == "up_proj" else "layer 1"
    with pytest.raises(PlanError, match=f"weights of {which} are not those"):
        logits(model)


@pytest.mark.parametrize("changes", [
    {"rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4}}, {"rms_norm_eps": 1e-2},
    {"hidden_act": "relu"}, {"max_position_embeddings": 1 << 20},
], ids=lambda changes: next(iter(changes)))  # fmt: skip
def test_a_model_with_other_settings_is_refused_by_name(changes: dict[str, Any], tmp_path: Path) -> None:
    planned().save_pretrained(tmp_path)
    loaded = tf.LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="adaattn", **changes)
    name = next(iter(changes))
    says = f"{name}: the plan was verified for a model with .*, this one has .*calibrate again"
    with pytest.raises(PlanError, match=says):
        adaattn_hf.load_plan(loaded)


def of(config: Any) -> Any:
    auto = tf.AutoModelForMaskedLM if config.model_type == "bert" else tf.AutoModelForCausalLM
    return auto.from_config(config, attn_implementation="adaattn").eval()


SMALL: dict[str, Any] = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, pad_token_id=0,
)  # fmt: skip
MAKERS = {
    "gpt2": lambda: config_of("gpt2"),
    "bert": lambda: config_of("bert"),
    "mistral": lambda: tf.MistralConfig(**SMALL, sliding_window=8),
    "gemma3": lambda: tf.Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=8),
}


def test_settings_that_change_nothing_proven_are_free(tmp_path: Path) -> None:
    model = planned()
    right = logits(model)
    model.save_pretrained(tmp_path)
    loaded = tf.LlamaForCausalLM.from_pretrained(
        tmp_path, attn_implementation="adaattn", attention_dropout=0.1, pad_token_id=3, use_cache=False
    ).eval()
    loaded.config.mine = "a note"
    assert torch.equal(logits(adaattn_hf.load_plan(loaded)), right)


@pytest.mark.parametrize("family", MAKERS)
def test_a_saved_model_has_the_settings_that_its_plan_names(family: str, tmp_path: Path) -> None:
    """Nothing that loading alone changes is among them."""
    model = of(MAKERS[family]())
    give(model, make_choice("window", window=WINDOW))
    right = logits(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="adaattn").eval()
    assert torch.equal(logits(adaattn_hf.load_plan(loaded)), right)
    plan = adaattn_hf.plan_of(loaded)
    assert plan is not None
    assert {"num_hidden_layers", "model_type", "architectures", "dtype"} & set(plan.configuration) <= {
        "num_hidden_layers"
    }
    assert len(plan.configuration) > 8


def test_autocast_to_another_dtype_is_refused_and_to_the_same_is_not() -> None:
    model = planned()
    logits(model)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(PlanError, match="autocast: the plan was calibrated in float32, autocast computes in bfloat16"),
    ):
        logits(model)
    half = fresh_pair("llama").ours.to(torch.bfloat16)
    give(half, make_choice("window", window=WINDOW))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.isfinite(logits(half)).all()
    with torch.autocast("cpu", torch.float16), pytest.raises(PlanError, match="autocast computes in float16"):
        logits(half)


def test_training_in_mixed_precision_goes_on() -> None:
    model = planned().train()
    with torch.autocast("cpu", torch.bfloat16):
        model(input_ids=tokens(), labels=tokens()).loss.backward()
        assert torch.isfinite(logits(model.eval())).all()


def test_a_permission_belongs_to_the_process(tmp_path: Path) -> None:
    model = fresh_pair("llama").ours
    plan = plan_for(model, make_choice("window", window=WINDOW), verified=None)
    load_plan(model, plan, unverified=True)
    right = logits(model)
    assert torch.equal(logits(copy.deepcopy(model)), right)
    adaattn_hf.configure(model, "fast")
    assert torch.equal(logits(model), right)
    model.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())["adaattn"]
    assert "unverified" not in json.dumps(settings)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="adaattn")
    with pytest.raises(
        PlanError, match=r"never verified .*in this process: adaattn_hf.load_plan\(model, unverified=True\)"
    ):
        adaattn_hf.load_plan(loaded)
    adaattn_hf.load_plan(loaded, unverified=True)
    assert torch.equal(logits(loaded), right)
    assert torch.equal(logits(adaattn_hf.load_plan(loaded)), right), "the one that it was allowed"
    loaded.config.adaattn = {"plan": replace(plan, lengths=(32,)).to_dict()}
    with pytest.raises(PlanError, match=r"config.adaattn\['plan'\]: got another one than the model runs by"):
        logits(loaded)
    with pytest.raises(PlanError, match="never verified"):
        adaattn_hf.load_plan(loaded)
    failed = replace(PROVEN, passed=False, upper=2.0, sentence="failed")
    with pytest.raises(PlanError, match="failed on held-out text"):
        adaattn_hf.load_plan(loaded, replace(plan, verified=failed))


def test_a_file_that_holds_a_permission_does_not_give_it(tmp_path: Path) -> None:
    model = fresh_pair("llama").ours
    plan = plan_for(model, make_choice("window", window=WINDOW), verified=None)
    model.config.adaattn = {"plan": plan.to_dict(), "unverified": True}
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="adaattn")
    with pytest.raises(adaattn_hf.ConfigError, match="unverified: got True, expected no such setting"):
        logits(loaded)
    with pytest.raises(PlanError, match="never verified"):
        adaattn_hf.load_plan(loaded)
    del loaded.config.adaattn["unverified"]
    adaattn_hf.load_plan(loaded, unverified=True)
    assert torch.isfinite(logits(loaded)).all()


def test_a_trained_model_is_saved_without_its_plan(tmp_path: Path, heard: pytest.LogCaptureFixture) -> None:
    model = planned()
    stepped(model)
    assert said(heard, "is saved without it; calibrate the trained model") == 1
    under = logits(model)
    assert adaattn_hf.plan_of(model) is not None
    model.save_pretrained(tmp_path)
    assert "plan" not in json.loads((tmp_path / "config.json").read_text()).get("adaattn", {})
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="adaattn").eval()
    exact = logits(loaded)
    adaattn_hf.remove_plan(model)
    torch.testing.assert_close(exact, logits(model))
    assert not torch.allclose(exact, under, atol=1e-4)


def test_a_copy_of_a_trained_model_goes_on_under_the_plan(heard: pytest.LogCaptureFixture) -> None:
    model = stepped(planned())
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin), logits(model))
    checkpointed(twin, reentrant=False)
    bound = bound_plan(stepped(twin))
    assert bound is not None
    assert bound.state == "trained"
    assert said(heard, "the model is trained under its plan") == 1
    assert "plan" not in twin.config.to_dict()["adaattn"]


def test_towers_are_saved_without_the_plan_too(tmp_path: Path) -> None:
    model = tf.LlavaForConditionalGeneration._from_config(composite(), attn_implementation="adaattn")
    model.config.dtype = torch.float32
    tower = model.model.language_model
    plan = plan_for(tower, make_choice("window", window=WINDOW), weight_hash=model_hash(model))
    adaattn_hf.load_plan(model, plan)
    assert model.config.to_dict()["text_config"]["adaattn"]["plan"] == plan.to_dict()
    model.train()(**composite_inputs()).logits.sum().backward()
    model.config.save_pretrained(tmp_path)
    assert '"plan"' not in (tmp_path / "config.json").read_text()
    assert adaattn_hf.plan_of(copy.deepcopy(model)) == plan


@needs_tracing
@pytest.mark.parametrize("trained", [True, False], ids=["behind training", "allowed"])
def test_plans_that_prove_nothing_compile(trained: bool) -> None:
    model = fresh_pair("llama").ours
    if trained:
        give(model, make_choice("window", window=WINDOW))
        stepped(model)
    else:
        load_plan(model, plan_for(model, make_choice("window", window=WINDOW), verified=None), unverified=True)
    expected = logits(model)
    torch.testing.assert_close(logits(torch.compile(model, backend="eager", fullgraph=True)), expected)


def test_a_model_built_in_inference_mode_runs_its_plan(tmp_path: Path) -> None:
    model = planned()
    right = logits(model)
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        loaded = type(model).from_pretrained(tmp_path, attn_implementation="adaattn").eval()
        adaattn_hf.load_plan(loaded)
        for _ in range(2):
            assert torch.equal(loaded(input_ids=tokens()).logits, right)
        built = type(model)(copy.deepcopy(config_of("llama"))).eval()
        built.set_attn_implementation("adaattn")
        give(built, make_choice("window", window=WINDOW))
        assert torch.isfinite(built(input_ids=tokens()).logits).all()
    assert torch.equal(logits(loaded), right)
