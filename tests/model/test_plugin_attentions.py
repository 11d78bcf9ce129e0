"""`output_attentions=True` is answered with the weights that were used."""

import pytest
import torch

from ..support.models import ENCODER_DECODERS, assert_same, padding, pair, tokens


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "mistral-window", "t5"])
def test_weights_equal_eager(name: str, side: str) -> None:
    stock, ours = pair(name)
    ids, mask = tokens(), padding(side)
    inputs = dict(input_ids=ids, attention_mask=mask, output_attentions=True)
    kinds = ["attentions"]
    if name in ENCODER_DECODERS:
        inputs["decoder_input_ids"] = ids[:, :5]
        kinds = ["encoder_attentions", "decoder_attentions", "cross_attentions"]
    with torch.no_grad():
        expected, actual = stock(**inputs), ours(**inputs)
    for kind in kinds:
        layers, found = getattr(expected, kind), getattr(actual, kind)
        assert len(layers) == len(found) > 0
        for weights, ours_weights in zip(layers, found, strict=True):
            rows = None
            if mask is not None and kind in ("attentions", "encoder_attentions"):
                rows = mask[:, None, :].expand(-1, weights.shape[1], -1)
            assert_same(weights, ours_weights, rows)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_weights_of_a_cached_step_equal_eager(name: str) -> None:
    stock, ours = pair(name)
    ids, mask = tokens(), padding("left")
    assert mask is not None
    settings = dict(attention_mask=mask, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
    with torch.no_grad():
        expected = stock.generate(ids, **settings, output_attentions=True)
        actual = ours.generate(ids, **settings, output_attentions=True)
    assert len(expected.attentions) == len(actual.attentions) == 3
    for step, (layers, found) in enumerate(zip(expected.attentions, actual.attentions, strict=True)):
        for weights, ours_weights in zip(layers, found, strict=True):
            rows = mask[:, None, :].expand(-1, weights.shape[1], -1) if step == 0 else None
            assert_same(weights, ours_weights, rows)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_nobody_gets_weights_unasked(name: str) -> None:
    _, ours = pair(name)
    with torch.no_grad():
        assert ours(input_ids=tokens()).attentions is None
