"""Every task head of GPT-2, BERT and LLaMA: outputs, loss and gradients equal stock eager attention's."""

import importlib
import inspect
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from ..support.families import configured, models
from ..support.models import (
    BERT_HEADS,
    GPT2_HEADS,
    HIDDEN,
    LLAMA_HEADS,
    Pair,
    assert_same,
    build,
    config_of,
    padding,
    switch_off_dropout,
    tokens,
)

QUESTIONS = dict(start_positions=torch.tensor([5, 6, 7]), end_positions=torch.tensor([6, 8, 9]))
HEADS = {"gpt2": GPT2_HEADS, "bert": BERT_HEADS, "llama": LLAMA_HEADS}
CASES = [pytest.param(family, cls, id=cls.__name__) for family, heads in HEADS.items() for cls in heads]


def inputs_of(cls: type[tf.PreTrainedModel]) -> dict[str, Any]:
    """Padded inputs of a head, with labels where it has a loss."""
    name = cls.__name__
    # on the right: heads of BERT read the first token, and on the left a loss counts what the last of padding says
    ids, mask = tokens(), padding("right")
    ids = ids.masked_fill(mask == 0, 0)
    if "MultipleChoice" in name or "DoubleHeads" in name:
        # a second choice for every example: another example's first one
        ids = torch.stack([ids, ids.flip(0)], dim=1)
        mask = torch.stack([mask, mask], dim=1)
    given: dict[str, Any] = dict(input_ids=ids, attention_mask=mask)
    one_of_two = torch.tensor([0, 1, 0])
    ignored_padding = torch.where(mask.bool(), ids, -100)
    if "DoubleHeads" in name:
        given |= dict(mc_token_ids=mask.sum(dim=2) - 1, labels=ignored_padding, mc_labels=one_of_two)
    elif name == "BertForPreTraining":
        given |= dict(labels=ignored_padding, next_sentence_label=one_of_two)
    elif "TokenClassification" in name:
        given |= dict(labels=torch.where(mask.bool(), ids % 2, -100))
    elif "QuestionAnswering" in name:
        given |= QUESTIONS
    elif any(part in name for part in ("LMHead", "MaskedLM", "CausalLM")):
        given |= dict(labels=ignored_padding)
    elif "Model" not in name:
        given |= dict(labels=one_of_two)
    return given


def assert_equal_in_training(models: Pair, given: dict[str, Any], rtol: float) -> Any:
    """Outputs where tokens are real, the loss, and gradients to `rtol`; returns stock's outputs."""
    real = given["attention_mask"].bool()
    direction = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(2))
    outputs = []
    for model in models:
        model.train()
        switch_off_dropout(model)
        output = model(**given)
        loss = output.loss if "loss" in output else (output.last_hidden_state[real] * direction).sum(1).square().mean()
        loss.backward()
        outputs.append(output)
    expected, actual = outputs
    assert list(expected) == list(actual)
    compared = {key: value.detach() for key, value in expected.items() if isinstance(value, Tensor)}
    assert compared
    for key, value in compared.items():
        assert_same(value, actual[key].detach(), real if value.shape[: real.ndim] == real.shape else None)
    gradients = dict(models.ours.named_parameters())
    nonzero = 0
    for name, parameter in models.stock.named_parameters():
        found = gradients[name].grad
        assert (found is None) == (parameter.grad is None), name
        if parameter.grad is not None and found is not None:
            assert_same(parameter.grad, found, rtol=rtol)
            nonzero += int(parameter.grad.abs().max() > 1e-6)
    assert nonzero >= 10
    return expected


@pytest.mark.parametrize(("family", "cls"), CASES)
def test_outputs_loss_and_gradients_equal_eager(family: str, cls: type[tf.PreTrainedModel]) -> None:
    found = assert_equal_in_training(build(cls, config_of(family)), inputs_of(cls), rtol=1e-4)
    assert ("loss" in found) == (cls not in (tf.GPT2Model, tf.BertModel, tf.LlamaModel))


EVERYWHERE: list[tuple[Any, dict[str, Tensor]]] = [
    (tf.AutoModelForQuestionAnswering, QUESTIONS), (tf.AutoModelForTokenClassification, dict(labels=tokens() % 2)),
    (tf.AutoModelForCausalLM, dict(labels=tokens())), (tf.AutoModelForMaskedLM, dict(labels=tokens())),
]  # fmt: skip
"""Heads whose loss is over all positions: over all scores, or of labels at padding, as where an end token pads."""
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": dict(n_embd=32, n_layer=2, n_head=4, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0), "llama": {},
    "bert": {}, "roberta": {}, "electra": {}, "modernbert": dict(local_attention=4, global_attn_every_n_layers=2),
}  # fmt: skip


@pytest.mark.parametrize("stock", ["eager", "sdpa"])
@pytest.mark.parametrize(("family", "auto", "labels"), [
    pytest.param(family, auto, labels, id=f"{family}-{auto.__name__.removeprefix('AutoModelFor')}")
    for family, changes in FAMILIES.items() for auto, labels in EVERYWHERE
    if type(configured(family, changes)) in auto._model_mapping
])  # fmt: skip
def test_losses_over_padding_are_those_of_stock_attention(
    family: str, auto: Any, labels: dict[str, Tensor], stock: str
) -> None:
    """With padding on the right; a window of ModernBERT leaves the last of it nothing to see, which eager averages."""
    if family == "modernbert" and stock == "eager":
        pytest.skip("rows that see no key are averages in eager attention")
    models_ = models(family, FAMILIES[family], auto)
    models_.stock.set_attn_implementation(stock)
    losses = []
    for model in models_:
        output = model(input_ids=tokens(), attention_mask=padding("right"), **labels)
        output.loss.backward()
        losses.append(output.loss.detach())
    assert_same(*losses)
    gradients = [dict(model.named_parameters()) for model in models_]
    for name, parameter in gradients[0].items():
        if parameter.grad is not None:
            assert_same(parameter.grad, gradients[1][name].grad, rtol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("auto", [tf.AutoModelForQuestionAnswering, tf.AutoModelForTokenClassification])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_scores_at_padding_are_those_of_stock_sdpa(family: str, auto: Any, side: str) -> None:
    stock, ours = models(family, FAMILIES[family], auto)
    stock.set_attn_implementation("sdpa")
    with torch.no_grad():
        expected, actual = (m(input_ids=tokens(), attention_mask=padding(side)) for m in (stock, ours))
    for name, scores in expected.items():
        assert_same(scores, actual[name])


@pytest.mark.parametrize("family", list(HEADS))
def test_the_list_of_heads_is_complete(family: str) -> None:
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    known = {
        name for name, cls in vars(module).items() if inspect.isclass(cls) and issubclass(cls, tf.PreTrainedModel)
        and cls.__module__ == module.__name__ and not name.endswith("PreTrainedModel")
    }  # fmt: skip
    assert {cls.__name__ for cls in HEADS[family]} == known
