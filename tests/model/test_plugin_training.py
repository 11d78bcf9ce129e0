"""Training: gradients with and without checkpointing, dropout, a few steps of an optimiser."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ..support.models import (
    DECODERS,
    ENCODERS,
    HIDDEN,
    assert_same,
    fresh_pair,
    main_output,
    padding,
    switch_off_dropout,
    tokens,
)


def keywords(name: str) -> dict[str, Any]:
    return {} if name in ENCODERS else dict(use_cache=False)


def gradients(model: Any, name: str, checkpointing: str) -> dict[str, Tensor]:
    model.train()
    switch_off_dropout(model)
    if checkpointing != "off":
        reentrant = checkpointing == "reentrant"
        # renamed in the newest Transformers, which warns of the old name
        if hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
        else:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
    mask = padding("left")
    assert mask is not None
    output = main_output(model(input_ids=tokens(), attention_mask=mask, **keywords(name)))[mask.bool()]
    direction = torch.randn(output.shape[-1], generator=torch.Generator().manual_seed(2))
    (output * direction).sum(1).square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", [n for n in (*DECODERS, *ENCODERS) if n != "llama4-chunked"])
def test_gradients_equal_eager(name: str) -> None:
    stock, ours = fresh_pair(name)
    expected, actual = gradients(stock, name, "off"), gradients(ours, name, "off")
    assert expected.keys() == actual.keys()
    assert len(expected) > 10
    for key, gradient in expected.items():
        assert_same(gradient, actual[key], rtol=1e-4)


@pytest.mark.parametrize("checkpointing", ["nonreentrant", "reentrant"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "gemma3-hybrid"])
def test_checkpointing_changes_no_bit_of_a_gradient(name: str, checkpointing: str) -> None:
    plain, checkpointed = fresh_pair(name).ours, fresh_pair(name).ours
    expected = gradients(plain, name, "off")
    actual = gradients(checkpointed, name, checkpointing)
    assert expected.keys() == actual.keys()
    for key, gradient in expected.items():
        assert torch.equal(gradient, actual[key]), key


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_attention_dropout_is_active_in_training_alone(name: str) -> None:
    key = {"gpt2": "attn_pdrop", "bert": "attention_probs_dropout_prob", "llama": "attention_dropout"}[name]
    changes: dict[str, Any] = {key: 0.5}
    stock, ours = fresh_pair(name, **changes)
    ids = tokens()
    with torch.no_grad():
        assert_same(main_output(stock(input_ids=ids)), main_output(ours(input_ids=ids)))
        ours.train()
        first, second = main_output(ours(input_ids=ids)), main_output(ours(input_ids=ids))
        torch.manual_seed(5)
        third = main_output(ours(input_ids=ids))
        torch.manual_seed(5)
        again = main_output(ours(input_ids=ids))
    assert float((first - second).abs().max()) > 1e-3
    assert torch.equal(third, again)


def test_dropout_keeps_the_mean_of_the_output() -> None:
    """The mean over many draws of one layer's output is the output without dropout."""
    _, ours = fresh_pair("gpt2", attn_pdrop=0.3, n_layer=1)
    attention = ours.transformer.h[0].attn
    states = torch.randn(1, 11, HIDDEN).repeat(4000, 1, 1)
    with torch.no_grad():
        attention.eval()
        expected = attention(states[:1])[0][0]
        attention.train()
        attention.resid_dropout.p = 0.0
        draws = attention(states)[0]
    mean, spread = draws.mean(dim=0), draws.std(dim=0) / draws.shape[0] ** 0.5
    assert float(spread.max()) > 0
    assert float(((mean - expected).abs() / spread.clamp(min=1e-6)).max()) < 5


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_training_under_autocast_gives_finite_gradients_near_fp32(name: str) -> None:
    stock, ours = fresh_pair(name)
    exact = gradients(stock, name, "off")
    stock.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theirs = gradients(stock, name, "off")
        mine = gradients(ours, name, "off")
    assert mine.keys() == theirs.keys()
    scale = max(float(g.abs().max()) for g in exact.values())
    for key, gradient in mine.items():
        off = float((gradient - exact[key]).abs().max())
        off_of_stock = float((theirs[key] - exact[key]).abs().max())
        assert off <= 2 * off_of_stock + 0.01 * scale, key


def test_a_gradient_scaler_takes_the_steps_that_it_takes_under_eager() -> None:
    """Losses scaled up, gradients scaled back and looked at for infinities, as training in float16 does."""
    weights = []
    for model in fresh_pair("llama"):
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=1)
        for _ in range(3):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(input_ids=tokens(), labels=tokens()).loss
            scaler.scale(loss).backward()
            scaler.step(optimiser)
            scaler.update()
            optimiser.zero_grad()
        weights.append((scaler.get_scale(), model.model.layers[0].self_attn.q_proj.weight.detach()))
    (stock_scale, stock), (scale, ours) = weights
    assert scale == stock_scale
    assert_same(stock, ours, rtol=1e-3)
