"""Score ranks folded into the weights: the same function as the projection applied after, and back bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import adaattn_hf
from adaattn_hf.attention.tap import tapping
from adaattn_hf.calibration import fisher
from adaattn_hf.calibration.arms import ModelArms
from adaattn_hf.patches.plans.fold import complete
from adaattn_hf.plans import store
from adaattn_hf.plans.plan import EXACT
from adaattn_hf.stats.spectrum import score_factors

from ..support.choices import make_choice
from ..support.plans import give

LENGTH = 40


def _gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=2))


def _bert() -> nn.Module:
    return BertForMaskedLM(
        BertConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=64,
        )
    )  # fmt: skip


def _llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16,
        )
    )  # fmt: skip


MODELS = {"gpt2": _gpt2, "bert": _bert, "llama": _llama}


def _tokens() -> torch.Tensor:
    return torch.randint(0, 64, (1, LENGTH), generator=torch.Generator().manual_seed(0))


def _ranked(family: str, max_length: int = 64, **choice: Any) -> Any:
    """A model whose layer 1 keeps 6 columns of its first head's scores."""
    torch.manual_seed(0)
    model: Any = MODELS[family]().eval()
    model.set_attn_implementation("adaattn")
    for parameter in model.parameters():  # heads that attend somewhere, and biases
        parameter.data += torch.randn(parameter.shape) * (0.4 if parameter.ndim > 1 else 0.1)
    moments = fisher.Moments()
    with torch.no_grad(), tapping(moments.tap):
        model(_tokens())
    query_basis, key_basis = score_factors(moments.grams[1].centred(), 6)
    name = store.remember_tensors(
        {"layers.1.query_basis.0": query_basis[0].float(), "layers.1.key_basis.0": key_basis[0].float()}
    )
    kv_heads = moments.shapes[1][1]
    choices = (make_choice(**{"rank": 6, **choice}), *[EXACT] * (kv_heads - 1))
    give(model, {1: choices}, lengths=(max_length,), tensors=name)
    return model


def fold(model: Any) -> Any:
    return adaattn_hf.prepare(model, unpad=False, growing_cache=False, fold_rank=True)


@pytest.mark.parametrize("family", ["gpt2", "bert"])
@torch.no_grad()
def test_folding_is_the_projection_applied_after(family: str) -> None:
    model = _ranked(family)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    projected = model(_tokens()).logits
    fold(model)
    changed = [name for name, value in model.state_dict().items() if not torch.equal(value, weights[name])]
    assert changed
    assert all(".1." in name for name in changed)
    torch.testing.assert_close(model(_tokens()).logits, projected, rtol=1e-4, atol=2e-4)
    adaattn_hf.restore(model)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(_tokens()).logits, projected)
    adaattn_hf.remove_plan(model)
    assert float((model(_tokens()).logits - projected).abs().max()) > 1e-2, "the rank is felt"


@torch.no_grad()
def test_without_the_plan_folded_weights_give_the_exact_scores() -> None:
    """All columns together are what they were: exact rows and exact attention do not notice."""
    model = _ranked("gpt2")
    exact = ModelArms(model).exact(_tokens())
    fold(model)
    torch.testing.assert_close(ModelArms(model).exact(_tokens()), exact, rtol=1e-4, atol=2e-4)
    short = _ranked("gpt2", max_length=16)
    planned = short(_tokens()).logits
    torch.testing.assert_close(fold(short)(_tokens()).logits, planned, rtol=1e-4, atol=2e-4)


@torch.no_grad()
def test_decode_and_weights_of_folded_ranks() -> None:
    model = _ranked("gpt2")
    tokens = _tokens()
    kwargs: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(tokens, attention_mask=torch.ones_like(tokens), **kwargs)
    attentions = model(tokens, output_attentions=True).attentions[1]
    fold(model)
    assert torch.equal(model.generate(tokens, attention_mask=torch.ones_like(tokens), **kwargs), wanted)
    torch.testing.assert_close(
        model(tokens, output_attentions=True).attentions[1], attentions, rtol=1e-4, atol=1e-4
    )


def test_a_rotary_embedding_between_is_refused_and_nothing_is_changed() -> None:
    model = _ranked("llama")
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        planned = model(_tokens()).logits
    with pytest.raises(adaattn_hf.PrepareError, match=r"layer 1: folding changes the scores .* rotary"):
        fold(model)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        assert torch.equal(model(_tokens()).logits, planned)


def test_a_plan_without_ranks_and_a_model_without_a_plan_are_refused() -> None:
    model = _ranked("gpt2", rank=0, kind="window", window=4)
    with pytest.raises(adaattn_hf.PrepareError, match="takes no score rank"):
        fold(model)
    adaattn_hf.remove_plan(model)
    with pytest.raises(adaattn_hf.PrepareError, match="carries no plan"):
        fold(model)


def test_completed_bases_multiply_to_one() -> None:
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(8, 8, generator=generator, dtype=torch.float64)
    basis = torch.linalg.qr(torch.randn(8, 3, generator=generator, dtype=torch.float64))[0]
    query, key = torch.linalg.inv(root).T @ basis, root @ basis
    whole_query, whole_key = complete(query, key)
    torch.testing.assert_close(whole_query @ whole_key.T, torch.eye(8, dtype=torch.float64))
    torch.testing.assert_close(whole_query[:, :3], query)
    torch.testing.assert_close(whole_key[:, :3], key)
