"""Generation: every cache, chunked prefill, beams; step by step against stock eager attention."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StaticCache

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


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_pieces_with_a_static_cache_equal_the_whole(name: str) -> None:
    """Prefill in two pieces of unlike length, then single tokens: the same logits as in one pass."""
    _, ours = pair(name)
    ids, cache = tokens(), StaticCache(config=ours.config, max_cache_len=16)
    with torch.no_grad():
        whole = ours(input_ids=ids, use_cache=False).logits
        pieces, start = [], 0
        for length in (4, 5, 1, 1):
            piece = ids[:, start : start + length]
            positions = torch.arange(start, start + length)[None].expand(len(ids), -1)
            pieces.append(ours(input_ids=piece, past_key_values=cache, position_ids=positions).logits)
            start += length
    assert start == ids.shape[1]
    assert_same(whole, torch.cat(pieces, dim=1))


def test_a_later_call_may_use_another_length_of_cache() -> None:
    """What one call remembers of its mask does not reach into the next."""
    stock, ours = pair("llama")
    for length in (11, 5, 8):
        given = {"input_ids": tokens(length=length), "attention_mask": padding("left", length=length)}
        with torch.no_grad():
            assert_same(stock(**given).logits, ours(**given).logits, given["attention_mask"])
