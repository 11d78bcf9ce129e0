"""Adapters under a plan: trained, saved and loaded beside it, merged, and around quantised layers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import adaattn_hf
from adaattn_hf.plans.plan import Plan, PlanError

from ..support.choices import make_choice
from ..support.models import config_of, logits
from ..support.plans import give, lora, said, stepped

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*cast from torch.float32 to float16:UserWarning"),
    pytest.mark.usefixtures("heard"),
]
WINDOW = 2
OTHER = "are not those that the plan was calibrated on"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A model on disk, without a plan; its sizes are whole blocks of every quantisation."""
    torch.manual_seed(0)
    config = tf.LlamaConfig(**{**config_of("llama").to_dict(), "hidden_size": 64, "intermediate_size": 128})
    config.head_dim = 16
    tf.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


class Codes(nn.Linear):
    """A projection whose weight is int8, with a scale beside it: PEFT wraps it as the Linear that it is."""

    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False)
        scale = linear.weight.detach().abs().amax() / 127
        codes = torch.round(linear.weight.detach() / scale).to(torch.int8)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.weight * self.scale)


def in_codes(path: Path) -> Any:
    model = plain(path)
    for layer in model.model.layers:
        for name, child in [*layer.self_attn.named_children()]:
            setattr(layer.self_attn, name, Codes(child))
    return model


def plain(path: Path, **more: Any) -> Any:
    return tf.LlamaForCausalLM.from_pretrained(path, attn_implementation="adaattn", **more).eval()


def in_torchao(path: Path) -> Any:
    quantization = pytest.importorskip("torchao.quantization")
    return plain(path, quantization_config=tf.TorchAoConfig(quantization.Int8WeightOnlyConfig()))


def in_bytes(path: Path) -> Any:
    pytest.importorskip("bitsandbytes")
    return plain(path, quantization_config=tf.BitsAndBytesConfig(load_in_8bit=True))


@pytest.mark.parametrize("loaded", [plain, in_codes, in_torchao, in_bytes], ids=lambda one: one.__name__)
def test_an_adapter_is_trained_saved_and_loaded_with_the_plan(
    loaded: Callable[[Path], Any], checkpoint: Path, tmp_path: Path, heard: pytest.LogCaptureFixture
) -> None:
    base = loaded(checkpoint)
    plan = give(base, make_choice("window", window=WINDOW))
    before = logits(base)
    wrapped = lora(base)
    assert torch.equal(logits(wrapped), before)  # B is 0
    stepped(wrapped)
    right = logits(wrapped)
    assert not torch.allclose(right, before, atol=1e-4)
    assert said(heard, "the model has adapters") == 1
    assert said(heard, "the model is trained under its plan") == 0

    place = tmp_path / "adapter"
    wrapped.save_pretrained(place)
    plan.save_pretrained(place)
    assert "library_name: peft" in (place / "README.md").read_text(), "the card of the adapter stays"
    again = peft.PeftModel.from_pretrained(loaded(checkpoint), place).eval()
    assert adaattn_hf.plan_of(adaattn_hf.load_plan(again, place)) == plan
    assert torch.equal(logits(again), right)
    adaattn_hf.remove_plan(again)
    assert not torch.allclose(logits(again), right, atol=1e-4), "the plan changes nothing, so nothing was shown"


def test_the_base_is_saved_with_its_plan_after_an_adapter_was_trained(checkpoint: Path, tmp_path: Path) -> None:
    base = plain(checkpoint)
    plan = give(base, make_choice("window", window=WINDOW))
    right = logits(base)
    stepped(lora(base)).unload().save_pretrained(tmp_path / "base")
    loaded = adaattn_hf.load_plan(plain(tmp_path / "base"))
    assert torch.equal(logits(loaded), right)
    assert adaattn_hf.plan_of(loaded) == plan


@pytest.mark.parametrize("target", ["q_proj", "gate_proj"])
@pytest.mark.parametrize("trained", [True, False], ids=["trained here", "loaded, without a pass between"])
def test_a_merged_model_is_refused_here_and_where_it_is_loaded(
    trained: bool, target: str, checkpoint: Path, tmp_path: Path
) -> None:
    base = plain(checkpoint)
    give(base, make_choice("window", window=WINDOW))
    logits(base)
    wrapped = lora(base, target, init_lora_weights=trained)
    merged = (stepped(wrapped) if trained else wrapped).merge_and_unload()
    with pytest.raises(PlanError, match=OTHER):
        logits(merged)
    merged.save_pretrained(tmp_path / "merged")
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["adaattn"]["plan"] is not None
    loaded = plain(tmp_path / "merged")
    with pytest.raises(PlanError, match=OTHER):
        adaattn_hf.load_plan(loaded)
    adaattn_hf.remove_plan(loaded)
    adaattn_hf.remove_plan(merged)
    torch.testing.assert_close(logits(loaded), logits(merged))


@pytest.mark.parametrize("more", [{"bias": "all"}, {"modules_to_save": ["norm"]}], ids=["biases", "a saved module"])
def test_training_more_than_adapters_is_noticed_by_whose_weights_they_are(
    more: dict[str, Any], checkpoint: Path, heard: pytest.LogCaptureFixture
) -> None:
    """PEFT trains a copy of a module to save and leaves the model's own; biases are the model's own."""
    base = plain(checkpoint, attention_bias=True)
    give(base, make_choice("window", window=WINDOW))
    stepped(lora(base, **more))
    own = "bias" in more
    assert said(heard, "the model is trained under its plan") == own
    assert ("plan" not in base.config.to_dict()["adaattn"]) == own


def test_what_is_thawed_later_is_noticed(checkpoint: Path, heard: pytest.LogCaptureFixture) -> None:
    base = plain(checkpoint)
    give(base, make_choice("window", window=WINDOW))
    wrapped = stepped(lora(base))
    assert said(heard, "the model is trained under its plan") == 0
    base.model.layers[0].self_attn.o_proj.weight.requires_grad_(True)
    stepped(wrapped)
    assert said(heard, "the model is trained under its plan") == 1


def test_mixed_precision_trains_and_evaluates_between_steps(checkpoint: Path) -> None:
    base = plain(checkpoint)
    give(base, make_choice("window", window=WINDOW))
    wrapped = lora(base)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(PlanError, match="autocast"):
            logits(wrapped)
        stepped(wrapped)
        assert torch.isfinite(logits(wrapped)).all()
    assert isinstance(adaattn_hf.plan_of(wrapped), Plan)
