"""Training: gradients with and without checkpointing, dropout, a few steps of an optimiser."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ..support.models import (
    DECODERS,
    ENCODERS,
    assert_same,
    cacheless,
    checkpointed,
    fresh_pair,
    main_output,
    padding,
    switch_off_dropout,
    tokens,
)

DROPOUT = {
    "gpt2": "attn_pdrop", "bert": "attention_probs_dropout_prob", "llama": "attention_dropout",
    "gemma3-hybrid": "attention_dropout",
}  # fmt: skip
"""Settings of the dropout of attention weights."""


def gradients(model: Any, name: str, checkpointing: str = "off", seed: int = 3) -> dict[str, Tensor]:
    model.train()
    if checkpointing != "off":
        checkpointed(model, checkpointing == "reentrant")
    if checkpointing == "reentrant":
        model.enable_input_require_grads()
    mask = padding("left")
    torch.manual_seed(seed)
    output = main_output(model(input_ids=tokens(), attention_mask=mask, **cacheless(name)))[mask.bool()]
    direction = torch.randn(output.shape[-1], generator=torch.Generator().manual_seed(2))
    torch.manual_seed(4)  # drawn while gradients are computed, this would change what a replay draws
    (output * direction).sum(1).square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", [n for n in (*DECODERS, *ENCODERS) if n != "llama4-chunked"])
def test_gradients_equal_eager(name: str) -> None:
    both = fresh_pair(name)
    for model in both:
        switch_off_dropout(model)
    expected, actual = (gradients(model, name) for model in both)
    assert expected.keys() == actual.keys()
    assert len(expected) > 10
    for key, gradient in expected.items():
        assert_same(gradient, actual[key], rtol=1e-4)


@pytest.mark.parametrize("checkpointing", ["nonreentrant", "reentrant"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "gemma3-hybrid"])
def test_checkpointing_changes_no_bit_of_a_gradient(name: str, checkpointing: str) -> None:
    """The dropout of attention weights is drawn again as it was."""
    expected, actual, other = (
        gradients(fresh_pair(name, **{DROPOUT[name]: 0.2}).ours, name, way, seed)
        for way, seed in (("off", 3), (checkpointing, 3), ("off", 5))
    )
    assert expected.keys() == actual.keys()
    for key, gradient in expected.items():
        assert torch.equal(gradient, actual[key]), key
    assert any(not torch.equal(gradient, other[key]) for key, gradient in expected.items()), "no dropout"


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_attention_dropout_is_active_in_training_alone(name: str) -> None:
    stock, ours = fresh_pair(name, **{DROPOUT[name]: 0.5})
    ids = tokens()
    with torch.no_grad():
        assert_same(main_output(stock(input_ids=ids)), main_output(ours(input_ids=ids)))
        ours.train()
        outputs = []
        for seed in (4, 5, 5):
            torch.manual_seed(seed)
            outputs.append(main_output(ours(input_ids=ids)))
    assert float((outputs[0] - outputs[1]).abs().max()) > 1e-3
    assert torch.equal(*outputs[1:])


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
