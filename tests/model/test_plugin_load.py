"""One string, wherever Transformers takes one; and what is saved with a model."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

import adaattn_hf
from adaattn_hf.attention.listeners import listening
from adaattn_hf.backends import select
from adaattn_hf.backends.select import BACKENDS

from ..support.models import answers, assert_same, config_of, fresh_pair, logits, padding, tokens
from ..support.names import registered
from ..support.recorder import Recorder

AUTO = {"gpt2": AutoModelForCausalLM, "llama": AutoModelForCausalLM, "bert": AutoModelForMaskedLM}


@pytest.mark.parametrize("name", list(AUTO))
def test_from_pretrained_and_from_config_take_the_name(name: str, tmp_path: Path) -> None:
    config = config_of(name)
    made = AUTO[name].from_config(config, attn_implementation="adaattn").eval()
    made.save_pretrained(tmp_path)
    loaded = AUTO[name].from_pretrained(tmp_path, attn_implementation="adaattn")
    stock = AUTO[name].from_pretrained(tmp_path, attn_implementation="eager")
    assert loaded.config._attn_implementation == made.config._attn_implementation == "adaattn"
    mask = padding("left")
    expected, *found = answers(stock, loaded, made, input_ids=tokens(), attention_mask=mask)
    for actual in found:
        assert_same(expected, actual, mask)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_switching_at_run_time_and_back(name: str) -> None:
    stock, ours = fresh_pair(name)
    mask = padding("left")
    for implementation in ("sdpa", "adaattn_eager", "eager", "adaattn"):
        ours.set_attn_implementation(implementation)
        assert ours.config._attn_implementation == implementation
        assert_same(*answers(stock, ours, input_ids=tokens(), attention_mask=mask), mask)


def composite() -> tf.LlavaConfig:
    text = dict(config_of("llama").to_dict(), vocab_size=72)
    vision: dict[str, Any] = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=8, patch_size=4,
        projection_dim=32,
    )  # fmt: skip
    return tf.LlavaConfig(
        text_config=tf.LlamaConfig(**text), vision_config=tf.CLIPVisionConfig(**vision), image_token_index=70,
        vision_feature_select_strategy="default", vision_feature_layer=-1,
    )  # fmt: skip


def composite_inputs() -> dict[str, torch.Tensor]:
    ids = tokens(batch=2, length=10)
    ids[:, 2:6] = 70  # four patches of one image
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(4))
    mask = padding("left", batch=2, length=10)
    mask[0, :2], mask[0, 2:] = 0, 1
    return dict(input_ids=ids, pixel_values=images, attention_mask=mask)


@pytest.mark.parametrize(
    "implementation",
    ["adaattn", *({"text_config": a, "vision_config": b} for a, b in (("adaattn", "sdpa"), ("sdpa", "adaattn")))],
    ids=["all", "text", "vision"],
)
def test_a_composite_model_takes_a_name_for_each_tower(implementation: str | dict[str, str]) -> None:
    torch.manual_seed(0)
    stock = tf.LlavaForConditionalGeneration._from_config(composite(), attn_implementation="eager").eval()
    ours = tf.LlavaForConditionalGeneration._from_config(composite(), attn_implementation=implementation).eval()
    ours.load_state_dict(stock.state_dict())
    towers = (
        implementation
        if isinstance(implementation, dict)
        else dict.fromkeys(("text_config", "vision_config"), "adaattn")
    )
    for tower, name in towers.items():
        assert getattr(ours.config, tower)._attn_implementation == name
    inputs = composite_inputs()
    assert_same(*answers(stock, ours, **inputs), inputs["attention_mask"])


def test_settings_are_saved_and_come_back(tmp_path: Path) -> None:
    _, ours = fresh_pair("llama")
    settings = adaattn_hf.AdaAttnConfig(backend="eager")
    adaattn_hf.configure(ours, settings)
    ours.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["adaattn"] == settings.to_dict()
    assert "_attn_implementation" not in saved
    loaded = tf.LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="adaattn")
    assert adaattn_hf.AdaAttnConfig.from_dict(loaded.config.adaattn) == settings
    assert {choice.backend for choice in adaattn_hf.explain(loaded).layers} == {"eager"}


def test_an_explanation_says_alike_reasons_once() -> None:
    _, ours = fresh_pair("llama")
    found = adaattn_hf.explain(ours, verbose=True)
    lines = str(found).splitlines()
    first = [n for n, line in enumerate(lines) if line.lstrip().startswith(("prefill", "padded"))]
    assert first == [1, 2]  # no reasons between phases that refuse alike
    reasons = [choice.refused for choice in found.layers]
    assert any(a != b for a, b in itertools.pairwise(reasons))  # so that there is a second list
    assert sum("not fa2: " in line for line in lines) == 1
    assert sum("fa2" in line and line.endswith(": for the reasons above") for line in lines) == 1
    assert "would serve, too: " in str(found)
    assert "one query" in next(line for line in lines if line.lstrip().startswith("decode"))


@pytest.mark.parametrize("here", [False, True])
def test_an_explanation_is_short_of_what_needs_another_device(here: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten lines on a CPU: what needs a GPU is one of them."""
    model = fresh_pair("llama").ours
    found, of_gpu = adaattn_hf.explain(model, device="cpu"), adaattn_hf.explain(model, device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: here)
    lines = str(found).splitlines()
    assert len(lines) <= 10
    assert [line for line in lines if "fa2" in line or "triton" in line] == [
        f"           CUDA only{'' if here else ', no GPU here'}: fa4, fa3, fa3_fwd, fa2, triton"
    ]
    assert all("fa2" in choice.refused for choice in found.layers), "the reasons are there for who asks"
    assert "           CPU only: native" in str(of_gpu).splitlines()


def test_an_explanation_for_a_gpu_says_what_a_compiled_step_runs() -> None:
    model = fresh_pair("llama").ours
    found = {one.phase: one for one in adaattn_hf.explain(model, device="cuda", dtype=torch.bfloat16).layers}
    assert list(found) == ["prefill", "padded", "decode", "compiled"]
    installed = not found["compiled"].refused.get("triton")
    assert found["compiled"].backend == ("triton" if installed else "sdpa")
    assert found["compiled"].kind.compiling
    model.set_attn_implementation("adaattn_sdpa")
    assert adaattn_hf.explain(model, device="cuda").layers[-1].backend == "sdpa"
    assert "compiled" not in {one.phase for one in adaattn_hf.explain(model).layers}


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
def test_a_backend_that_can_serve_nothing_here_is_refused_at_load() -> None:
    """By Transformers, which knows no such name here, and with all reasons by `check`."""
    with registered():
        model = AutoModelForCausalLM.from_config(config_of("llama"), attn_implementation="adaattn")
        for name in ("adaattn_fa2", "adaattn_fa3", "adaattn_fa3_fwd", "adaattn_fa4"):
            with pytest.raises(ValueError, match=f'attn_implementation="{name}"` is not supported'):
                AutoModelForCausalLM.from_config(config_of("llama"), attn_implementation=name)
            with pytest.raises(ValueError, match=f'attn_implementation="{name}"` is not supported'):
                model.set_attn_implementation(name)
            assert model.config._attn_implementation == "adaattn"
            config = config_of("llama")
            config._attn_implementation = name
            with pytest.raises(RuntimeError, match=r"cannot serve any call here: .*is not installed") as refused:
                adaattn_hf.check(config)
            assert "it runs on CUDA devices, of which torch sees none here" in str(refused.value)
        model.config.adaattn = {"backend": "triton"}
        for asked in (model, torch.nn.ModuleList([model])):
            with pytest.raises(RuntimeError, match=r"backend 'triton' cannot serve any call here"):
                adaattn_hf.check(asked)
        del model.config.adaattn
        for name in ("adaattn", "adaattn_sdpa", "adaattn_eager"):
            model.set_attn_implementation(name)
            adaattn_hf.check(model)


@pytest.mark.parametrize("family", ["gemma2-softcap", "gpt-oss-sinks"])
def test_where_transformers_refuses_a_name_the_settings_name_the_backend(family: str) -> None:
    model = fresh_pair(family).ours
    if not model._supports_sdpa:  # Gemma 2 since 5.24
        with pytest.raises(ValueError, match="scaled_dot_product_attention"):
            AutoModelForCausalLM.from_config(config_of(family), attn_implementation="adaattn_sdpa")
    right = logits(model)
    adaattn_hf.configure(model, adaattn_hf.AdaAttnConfig(backend="sdpa"))
    with listening(Recorder()) as heard:
        torch.testing.assert_close(logits(model), right)
    assert {forced for *_, forced in heard.calls} == {"sdpa"}


def test_devices_that_may_come_are_no_reason_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model on the processor whose backend wants a GPU that is there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    for name in ("triton", "fa2"):
        monkeypatch.setattr(BACKENDS[name], "missing", tuple, raising=False)
    monkeypatch.setattr(select, "installed", lambda *_: True)
    with registered():
        for name in ("adaattn_triton", "adaattn_fa2"):
            model = AutoModelForCausalLM.from_config(config_of("gpt2"), attn_implementation=name)
            adaattn_hf.check(model)
            assert model.device.type == "cpu"
