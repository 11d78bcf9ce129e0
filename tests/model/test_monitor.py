"""`config.adaattn["monitor"]`: a planned model watches itself, tightens, warns once, and changes nothing else."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import adaattn_hf
from adaattn_hf.attention.request import AttentionRequest
from adaattn_hf.attention.structure import CallStructure
from adaattn_hf.backends.eager import attention_weights
from adaattn_hf.plans import monitor, store
from adaattn_hf.plans.plan import PLAN_FORMAT, LayerPlan, Plan, UnitRecord
from adaattn_hf.plans.program import Program
from adaattn_hf.plans.tensors import LayerTensors

from ..support.choices import make_choice

LENGTH = 160
WINDOW = make_choice("window", 32, 4)


def _model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, initializer_range=0.2,
    )  # fmt: skip
    config._attn_implementation = "adaattn"
    model: LlamaForCausalLM = LlamaForCausalLM(config).eval()
    return model


def _planned(p95: float, monitor: bool = True) -> LlamaForCausalLM:
    model = _model()
    modules = dict(store.attention_modules(model, "llama"))
    plan = Plan(
        format=PLAN_FORMAT, model_type="llama", weight_hash="", dtype="float32", adaattn="0", torch="0",
        transformers="5.0.0", budget=1e-3, seed=0, data_fingerprint="", protocol={}, lengths=(256,), verified=None,
        layers=tuple(LayerPlan(i, store.weight_hash(m), (WINDOW, WINDOW)) for i, m in modules.items()),
        units=tuple(UnitRecord(i, h, 1e-4, 0.5, 1.0, p95 / 2, p95, p95**2) for i in modules for h in (0, 1)),
        tensors="",
    )  # fmt: skip
    store.attach(model, plan, unverified=True)
    model.config.adaattn = {**model.config.adaattn, "monitor": monitor}
    return model


def _tokens(batch: int = 1, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(0, 128, (batch, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_a_quiet_plan_is_sampled_and_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    watched, alone = _planned(p95=0.9), _planned(p95=0.9, monitor=False)
    for _ in range(9):
        torch.testing.assert_close(watched(_tokens()).logits, alone(_tokens()).logits, rtol=0, atol=0)
    assert adaattn_hf.statistics(alone) == []
    first, second = adaattn_hf.statistics(watched)
    assert (first["layer"], first["calls"], first["rows"]) == (0, 9, 9)
    assert first["tightened"] == second["tightened"] == []
    assert all(0.0 < mass < 1.0 for mass in first["dropped_mass"])
    assert first["predicted_kl"] > 0.0
    assert not caplog.records


@torch.no_grad()
def test_a_plan_that_drops_more_than_calibrated_becomes_exact_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = _planned(p95=1e-4)
    assert adaattn_hf.plan_of(model) is not None
    with caplog.at_level(logging.WARNING, logger="adaattn_hf"):
        for _ in range(monitor.LEAST_ROWS + 1):
            last = model(_tokens()).logits
    assert [entry["tightened"] for entry in adaattn_hf.statistics(model)] == [[0, 1], [0, 1]]
    assert len(caplog.records) == 1
    assert "Calibrate on text like this one" in caplog.text
    torch.testing.assert_close(last, _model()(_tokens()).logits)
    weights = model(_tokens(), output_attentions=True).attentions[0]
    assert float(weights[0, 0, -1, 4 : LENGTH - 32].abs().max()) > 0.0


@torch.no_grad()
def test_decode_is_sampled_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "STEP_SHARE", 4)
    model = _planned(p95=0.9)
    tokens = _tokens(length=48)
    model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=17, do_sample=False, pad_token_id=0
    )
    first = adaattn_hf.statistics(model)[0]
    assert first["calls"] == 17
    assert first["rows"] == 4


@torch.no_grad()
def test_padding_is_counted_and_not_sampled_batches_are_sampled_in_turn() -> None:
    model = _planned(p95=0.9)
    model(_tokens(batch=2))
    assert adaattn_hf.statistics(model)[0]["rows"] == 1
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, :50] = 0
    model(_tokens(batch=2), attention_mask=mask)
    first = adaattn_hf.statistics(model)[0]
    assert (first["calls"], first["rows"]) == (2, 1)


def test_training_steps_are_counted_and_not_sampled() -> None:
    model = _planned(p95=1e-4).train()
    for _ in range(monitor.LEAST_ROWS + 1):
        model(_tokens(), labels=_tokens()).loss.backward()
    first = adaattn_hf.statistics(model)[0]
    assert (first["calls"], first["rows"], first["tightened"]) == (monitor.LEAST_ROWS + 1, 0, [])


@torch.no_grad()
def test_each_model_has_a_monitor_of_its_own() -> None:
    one = _planned(p95=0.9)
    two = copy.deepcopy(one)
    one(_tokens())
    assert adaattn_hf.statistics(two) == []
    two(_tokens())
    two(_tokens())
    assert adaattn_hf.statistics(one)[0]["calls"] == 1
    assert adaattn_hf.statistics(two)[0]["calls"] == 2
    one.config.adaattn = {**one.config.adaattn, "monitor": True}  # set again: a new session
    one(_tokens())
    assert adaattn_hf.statistics(one)[0]["calls"] == 1


@pytest.mark.parametrize("extra", ["softcap", "sink_logits", "bias", "window"])
def test_dropped_mass_counts_what_the_call_counts(extra: str) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 96, 8, generator=generator) for heads in (4, 2, 2))
    extras: dict[str, dict[str, Any]] = {
        "softcap": {"softcap": 1.5},
        "sink_logits": {"sink_logits": torch.randn(4, generator=generator)},
        "bias": {"bias": torch.randn(1, 4, 96, 96, generator=generator)},
        "window": {},
    }
    structure = CallStructure(1, 96, 96, causal=True, window=48 if extra == "window" else None)
    request = AttentionRequest(query, key, value, structure, scaling=0.5, **extras[extra])
    program = adaattn_hf.plan_of(_planned(0.5)).layers[0]  # type: ignore[union-attr]
    rows = torch.tensor([3, 60, 95])
    found = monitor.dropped_mass(Program(program, LayerTensors(), 256), request, rows)
    weights = attention_weights(request)[0][:, rows]
    keys = torch.arange(96)
    far = (rows[:, None] - keys >= 32) & ((keys >= 4) | (extra == "window"))
    wanted = (weights * far).sum(-1).view(2, 2, 3).amax(1)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
