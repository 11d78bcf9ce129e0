"""What `explain` and `check` take: models, what holds models, and plans by their place."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

import adaattn_hf
from adaattn_hf.attention.listeners import listening
from adaattn_hf.plans.plan import PlanError

from ..support.choices import make_choice
from ..support.families import LISTED, configured, models
from ..support.models import fresh_pair, tokens
from ..support.plans import plan_for
from ..support.recorder import Recorder


def backends(thing: Any, **asked: Any) -> list[tuple[str, str]]:
    return [(choice.phase, choice.backend) for choice in adaattn_hf.explain(thing, **asked).layers]


@pytest.mark.parametrize("rate", [0.1, 0.0])
def test_dropout_in_training_is_said_to_keep_the_score_matrix(rate: float) -> None:
    sizes: dict[str, int] = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 50}
    config = tf.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2, attn_pdrop=rate)
    model = tf.GPT2LMHeadModel._from_config(config, attn_implementation="adaattn").train()
    said = "dropout in attention keeps the whole score matrix on a CPU"
    assert backends(model).count(("training", "sdpa")) == (2 if rate else 0)
    assert (said in str(adaattn_hf.explain(model))) == bool(rate)
    assert model.training
    assert said not in str(adaattn_hf.explain(model.eval()))


def test_pipelines_and_modules_that_hold_a_model() -> None:
    _, ours = fresh_pair("gpt2")

    class Pipeline:
        model = ours

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = ours

    for thing in (Pipeline(), Holder()):
        adaattn_hf.check(thing)
        assert backends(thing) == backends(ours)
    assert adaattn_hf.explain(Holder()).layers[0].layer.startswith("inner.transformer.h.0")


def test_two_models_in_one_are_both_explained() -> None:
    towers = nn.ModuleDict({"first": fresh_pair("gpt2").ours, "second": fresh_pair("llama").ours})
    found = adaattn_hf.explain(towers)
    assert found.model == "GPT2LMHeadModel, LlamaForCausalLM"
    assert {choice.layer.partition(".")[0] for choice in found.layers} == {"first", "second"}
    assert "first.transformer.h.0" in str(found)


@pytest.mark.parametrize("thing", ["gpt2", 3, None, object()])
def test_what_holds_no_model_is_refused(thing: Any) -> None:
    for ask in (adaattn_hf.explain, adaattn_hf.check)[isinstance(thing, str) :]:
        also = " or its configuration;" * (ask is adaattn_hf.check)
        with pytest.raises(TypeError, match=rf"model: got .*, expected a loaded model{also}"):
            ask(thing)


def test_a_directory_is_read_as_the_command_reads_it(tmp_path: Path) -> None:
    _, ours = fresh_pair("gpt2")
    ours.config.architectures = ["GPT2LMHeadModel"]
    ours.config.save_pretrained(tmp_path)
    for place in (tmp_path, str(tmp_path)):
        assert adaattn_hf.explain(place).layers == adaattn_hf.explain(ours).layers


NEEDS_DATA: dict[str, dict[str, Any]] = {
    "mixtral": {}, "lfm2": {"layer_types": ["conv", "full_attention"]}, "falcon_h1": LISTED["others"]["falcon_h1"],
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", NEEDS_DATA)
def test_experts_and_scans_need_no_data(family: str, dtype: torch.dtype) -> None:
    model = models(family, NEEDS_DATA[family], tf.AutoModelForCausalLM).ours
    found = adaattn_hf.explain(model, dtype=dtype)
    called = {choice.layer for choice in found.layers if choice.phase == "decode"}
    with torch.no_grad(), listening(Recorder()) as heard:
        model(input_ids=tokens())
    assert len(called) == len({module for module, _, _ in heard.calls}) > 0
    assert {choice.phase for choice in found.layers} == {"prefill", "padded", "decode"}
    assert {choice.kind.dtype for choice in found.layers} == {dtype}
    assert found.unknown == ()


def test_two_towers_are_explained_apart() -> None:
    text, image = configured("bert", {}), configured("vit", {})
    both = tf.SiglipConfig(
        text_config=configured("siglip_text_model", {}).to_dict(),
        vision_config=configured("siglip_vision_model", {}).to_dict(),
    )
    composed = tf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(image, text)
    for cls, config, starts in (
        (tf.SiglipModel, both, {"text_model", "vision_model"}),
        (tf.VisionEncoderDecoderModel, composed, {"encoder", "decoder"}),
    ):
        found = adaattn_hf.explain(cls._from_config(config, attn_implementation="adaattn").eval())
        assert {choice.layer.partition(".")[0] for choice in found.layers} == starts
        assert found.unknown == ()


def test_what_cannot_be_found_out_is_said() -> None:
    whisper = tf.AutoModelForSpeechSeq2Seq.from_config(configured("whisper", {}), attn_implementation="adaattn").eval()
    found = adaattn_hf.explain(whisper)
    assert {choice.layer.split(".")[1] for choice in found.layers} == {"decoder"}
    assert "inputs: WhisperEncoder cannot run without data: it reads 'input_features', which cannot be" in str(found)
    jetmoe = tf.AutoModelForCausalLM.from_config(configured("jetmoe", {}), attn_implementation="adaattn").eval()
    for model, inputs in ((jetmoe, None), (fresh_pair("llama").ours, {"input_ids": torch.zeros(1, 2, 3, 4)})):
        with pytest.raises(ValueError, match=r"^prefill: .* cannot run without data: "):
            adaattn_hf.explain(model, inputs=inputs)


def test_what_check_refuses_is_refused_in_the_same_words() -> None:
    model = tf.AutoModel.from_config(configured("xlm", {}), attn_implementation="adaattn").eval()
    with pytest.raises(adaattn_hf.UnsupportedModel) as refused:
        adaattn_hf.explain(model)
    with pytest.raises(adaattn_hf.UnsupportedModel, match=re.escape(str(refused.value))):
        adaattn_hf.check(model)


def test_a_part_that_cannot_be_built_is_refused_in_words() -> None:
    layer = fresh_pair("llama").ours.model.layers[0]
    with pytest.raises(ValueError, match="model: got LlamaDecoderLayer, which holds no Transformers model"):
        adaattn_hf.explain(layer)


def test_a_plan_by_its_place(tmp_path: Path) -> None:
    _, ours = fresh_pair("llama")
    plan = plan_for(ours, make_choice("window", 8, 2), layers=(0,), lengths=(64,))
    file = tmp_path / "adaattn_plan.json"
    file.write_text(plan.to_json(), encoding="utf-8")
    right = adaattn_hf.explain(ours, plan=plan)
    assert any(choice.plan for choice in right.layers)
    for place in (tmp_path, str(tmp_path), file):
        assert adaattn_hf.explain(ours, plan=place).layers == right.layers
    with pytest.raises(PlanError, match="does not exist; expected a plan"):
        adaattn_hf.explain(ours, plan=tmp_path / "nowhere")
