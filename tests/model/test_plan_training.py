"""Fine-tuning under a plan: windows go on while weights change, and no budget is claimed for what comes of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import adaattn_hf
from adaattn_hf.plans.plan import PlanError

from ..support.choices import make_choice
from ..support.models import fresh_pair, tokens
from ..support.plans import give, said
from .test_training import arguments, examples

WINDOW = 4


def planned() -> Any:
    model = fresh_pair("llama").ours
    give(model, make_choice("window", window=WINDOW))
    return model


def train(model: Any, directory: Path, **changes: Any) -> list[float]:
    trainer = tf.Trainer(
        model=model, args=arguments(directory, max_steps=6, **changes), train_dataset=examples(32),
        eval_dataset=examples(8, seed=1),
    )  # fmt: skip
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def windowed() -> Any:
    llama = fresh_pair("llama").ours
    config = tf.MistralConfig(**{**llama.config.to_dict(), "model_type": "mistral", "sliding_window": WINDOW})
    model = tf.MistralForCausalLM._from_config(config, attn_implementation="eager").eval()
    model.load_state_dict(llama.state_dict())
    return model


def test_steps_under_a_plan_of_windows_are_those_of_a_model_with_windows(tmp_path: Path) -> None:
    ours, theirs = train(planned(), tmp_path / "a"), train(windowed(), tmp_path / "b")
    exact = train(fresh_pair("llama").ours, tmp_path / "c")
    assert len(ours) == len(theirs) == 6
    assert ours == pytest.approx(theirs, abs=1e-4)
    assert ours != pytest.approx(exact, abs=1e-3)


def test_evaluation_goes_on_under_the_plan_and_says_so_once(tmp_path: Path, heard: pytest.LogCaptureFixture) -> None:
    model = planned()
    train(model, tmp_path, eval_strategy="steps", eval_steps=2)
    assert said(heard, "trained under its plan") == 1
    ids = tokens(length=20)
    with torch.no_grad():
        under = model.eval()(ids).logits
        adaattn_hf.remove_plan(model)
        assert not torch.allclose(under, model(ids).logits, atol=1e-4)


def test_checkpoints_of_trained_weights_are_exact(tmp_path: Path) -> None:
    model = planned()
    train(model, tmp_path, save_strategy="steps", save_steps=6)
    model.save_pretrained(tmp_path / "trained")
    ids = tokens(length=20)
    adaattn_hf.remove_plan(model)
    with torch.no_grad():
        exact = model.eval()(ids).logits
        for directory in ("trained", "checkpoint-6"):
            loaded = tf.AutoModelForCausalLM.from_pretrained(tmp_path / directory, attn_implementation="adaattn")
            torch.testing.assert_close(loaded(ids).logits, exact)


def test_a_plan_with_int8_is_refused_before_the_first_step_and_evaluates_as_before() -> None:
    model = fresh_pair("llama").ours
    give(model, make_choice(precision="int8"))
    loss = model(input_ids=tokens(), labels=tokens()).loss  # evaluation with gradients left on
    model.train()
    with pytest.raises(PlanError, match="int8, which has no gradient; train with"):
        model(input_ids=tokens(), labels=tokens())
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens(), labels=tokens()).loss, loss)
