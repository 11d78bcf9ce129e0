"""Generation: every cache, chunked prefill, beams; step by step against stock eager attention."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ..support.models import DECODERS, ENCODER_DECODERS, assert_same, padding, pair, tokens
from ..support.versions import skip_what_stock_cannot

CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {}, "static": dict(cache_implementation="static", disable_compile=True), "none": dict(use_cache=False),
    "chunked prefill": dict(prefill_chunk_size=4),
}  # fmt: skip


def assert_generates_the_same(name: str, mask: Tensor | None, **settings: Any) -> None:
    stock, ours = pair(name)
    ids = tokens()
    settings |= dict(
        attention_mask=torch.ones_like(ids) if mask is None else mask, max_new_tokens=6, do_sample=False,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    with torch.no_grad():
        expected, actual = stock.generate(ids, **settings), ours.generate(ids, **settings)
    assert torch.equal(expected.sequences, actual.sequences)
    assert len(expected.logits) == 6
    for before, after in zip(expected.logits, actual.logits, strict=True):
        assert_same(before, after, rtol=2e-6)


@pytest.mark.parametrize("cache", list(CACHES))
@pytest.mark.parametrize("name", list(DECODERS))
def test_left_padded_generation_equals_eager(name: str, cache: str) -> None:
    if cache == "static" and name == "bert-decoder":
        pytest.skip("Transformers has no static cache for BERT")
    skip_what_stock_cannot(name, cache)
    assert_generates_the_same(name, padding("left"), **CACHES[cache])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral-window", "gemma3-hybrid"])
def test_unpadded_generation_equals_eager(name: str, cache: str) -> None:
    assert_generates_the_same(name, None, **CACHES[cache])


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_sampling_with_a_seed_equals_eager(name: str) -> None:
    drawn = []
    for model in pair(name):
        torch.manual_seed(3)
        asked = dict(max_new_tokens=8, do_sample=True, temperature=0.8, top_k=20)
        drawn.append(model.generate(tokens(), attention_mask=padding("left"), **asked))
    assert torch.equal(*drawn)
    assert not torch.equal(drawn[1], model.generate(tokens(), max_new_tokens=8, do_sample=False))


@pytest.mark.parametrize("name", list(ENCODER_DECODERS))
def test_encoder_decoder_generation_equals_eager(name: str) -> None:
    skip_what_stock_cannot(name)
    assert_generates_the_same(name, padding("right"))
