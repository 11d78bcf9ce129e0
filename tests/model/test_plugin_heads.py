"""Every task head of GPT-2, BERT and LLaMA: outputs, loss and gradients equal stock eager attention's."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from ..support.models import (
    BERT_HEADS,
    GPT2_HEADS,
    HIDDEN,
    LLAMA_HEADS,
    assert_same,
    build,
    config_of,
    padding,
    switch_off_dropout,
    tokens,
)

HEADS = {"gpt2": GPT2_HEADS, "bert": BERT_HEADS, "llama": LLAMA_HEADS}
CASES = [pytest.param(family, cls, id=cls.__name__) for family, heads in HEADS.items() for cls in heads]


def inputs_of(cls: type[tf.PreTrainedModel]) -> dict[str, Any]:
    """Padded inputs of a head, with labels where it has a loss.

    Padding is on the right: heads of BERT read the first token, and a language model's loss on the left would
    count what the last token of padding says.
    """
    name = cls.__name__
    ids, mask = tokens(), padding("ones" if "QuestionAnswering" in name else "right")
    assert mask is not None
    ids = ids.masked_fill(mask == 0, 0)
    if "MultipleChoice" in name or "DoubleHeads" in name:
        # a second choice for every example: another example's first one
        ids = torch.stack([ids, ids.flip(0)], dim=1)
        mask = torch.stack([mask, mask], dim=1)
    given: dict[str, Any] = dict(input_ids=ids, attention_mask=mask)
    one_of_two = torch.tensor([0, 1, 0])
    ignored_padding = torch.where(mask.bool(), ids, -100)
    if "DoubleHeads" in name:
        given |= dict(
            mc_token_ids=mask.sum(dim=2) - 1,
            labels=ignored_padding,
            mc_labels=one_of_two,
        )
    elif name == "BertForPreTraining":
        given |= dict(labels=ignored_padding, next_sentence_label=one_of_two)
    elif "TokenClassification" in name:
        given |= dict(labels=torch.where(mask.bool(), ids % 2, -100))
    elif "QuestionAnswering" in name:
        given |= dict(start_positions=torch.tensor([5, 6, 7]), end_positions=torch.tensor([6, 8, 9]))
    elif any(part in name for part in ("LMHead", "MaskedLM", "CausalLM")):
        given |= dict(labels=ignored_padding)
    elif "Model" not in name:
        given |= dict(labels=one_of_two)
    return given


@pytest.mark.parametrize(("family", "cls"), CASES)
def test_outputs_loss_and_gradients_equal_eager(family: str, cls: type[tf.PreTrainedModel]) -> None:
    models = build(cls, config_of(family))
    given = inputs_of(cls)
    real = given["attention_mask"].bool()
    direction = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(2))
    outputs = []
    for model in models:
        model.train()
        switch_off_dropout(model)
        output = model(**given)
        loss = (
            output.loss
            if "loss" in output
            else (output.last_hidden_state[real] * direction).sum(1).square().mean()
        )
        loss.backward()
        outputs.append(output)
    expected, actual = outputs
    assert list(expected) == list(actual)
    assert ("loss" in expected) == (cls not in (tf.GPT2Model, tf.BertModel, tf.LlamaModel))
    compared = 0
    for key, value in expected.items():
        if not isinstance(value, Tensor):
            continue
        per_token = value.shape[: real.ndim] == real.shape
        assert_same(value.detach(), actual[key].detach(), real if per_token else None)
        compared += 1
    assert compared
    gradients = dict(models.ours.named_parameters())
    nonzero = 0
    for name, parameter in models.stock.named_parameters():
        if parameter.grad is None:
            assert gradients[name].grad is None
            continue
        found = gradients[name].grad
        assert found is not None, name
        assert_same(parameter.grad, found, rtol=1e-4)
        nonzero += int(parameter.grad.abs().max() > 1e-6)
    assert nonzero >= 10


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    ("family", "cls"),
    [
        ("gpt2", tf.GPT2ForQuestionAnswering),
        ("bert", tf.BertForQuestionAnswering),
        ("llama", tf.LlamaForQuestionAnswering),
    ],
)
def test_answers_of_padded_questions_are_scored_alike(
    family: str, cls: type[tf.PreTrainedModel], side: str
) -> None:
    """Scores of real tokens; a loss over padding positions too depends on how much padding a batch happens to have."""
    stock, ours = build(cls, config_of(family))
    ids, mask = tokens(), padding(side)
    with torch.no_grad():
        expected = stock(input_ids=ids, attention_mask=mask)
        actual = ours(input_ids=ids, attention_mask=mask)
    assert_same(expected.start_logits, actual.start_logits, mask)
    assert_same(expected.end_logits, actual.end_logits, mask)


@pytest.mark.parametrize("family", list(HEADS))
def test_the_list_of_heads_is_complete(family: str) -> None:
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    known = {
        name
        for name, cls in vars(module).items()
        if inspect.isclass(cls)
        and issubclass(cls, tf.PreTrainedModel)
        and cls.__module__ == module.__name__
        and not name.endswith("PreTrainedModel")
    }
    assert {cls.__name__ for cls in HEADS[family]} == known
