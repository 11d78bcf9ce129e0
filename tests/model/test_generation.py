"""Ways of generating beyond the usual caches: quantised and offloaded, drafts, reuse, compiled and batched steps."""

import copy
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import transformers as tf
from torch import Tensor
from transformers import DynamicCache, StaticCache

from ..support.compiled import Graphs, compiled_by
from ..support.models import assert_same, fresh_pair, padding, pair, tokens
from ..support.versions import needs_tracing

DECODERS = ("gpt2", "llama", "mistral-window", "gemma3-hybrid")


def greedy(model: Any, ids: Tensor, **settings: Any) -> Tensor:
    settings = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids), **settings}
    return model.generate(ids, **settings)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", DECODERS)
def test_offloaded_cache(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        # the cache's own code, whose copies need no waiting here: everything is done at once
        for place, name_ in ((torch, "Stream"), *((torch.cuda, one) for one in ("Stream", "stream", "default_stream"))):
            monkeypatch.setattr(place, name_, lambda *given: MagicMock())
    found = []
    for model in pair(name):
        cache = DynamicCache(config=model.config, offloading=True)
        found.append(greedy(model, tokens(), past_key_values=cache, attention_mask=padding("left")))
        assert cache.get_seq_length() > tokens().shape[1]
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_quantised_cache_in_fp8(name: str) -> None:
    if tuple(int(part) for part in tf.__version__.split(".")[:2]) < (5, 21):
        pytest.skip("Transformers has no fp8 cache before 5.21")
    stock, ours = pair(name)
    ids, answers, found = tokens(), [], []
    for model in (stock, ours):
        kept = tf.QuantizedCache("fp8", model.config)
        answers.append(greedy(model, ids, past_key_values=kept, max_new_tokens=10))
        cache = tf.QuantizedCache("fp8", model.config)
        with torch.no_grad():
            prompt = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
            step = model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True).logits
        found.append((prompt, step))
    assert torch.equal(*answers)
    assert_same(found[0][0], found[1][0])
    # keys that differ in the last bit may fall into neighbouring steps of eight bits
    assert_same(found[0][1], found[1][1], rtol=2e-2)


@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "mistral-window", "gemma2-softcap", "gemma3-hybrid", "gpt-oss-sinks"]
)
@pytest.mark.parametrize("draft", ["model", "prompt lookup"])
def test_drafts_change_nothing(name: str, draft: str) -> None:
    _, ours = pair(name)
    ids = tokens(1).repeat(1, 2)
    plain = greedy(ours, ids, max_new_tokens=10)
    by = {"assistant_model": fresh_pair(name).ours} if draft == "model" else {"prompt_lookup_num_tokens": 3}
    assert torch.equal(plain, greedy(ours, ids, max_new_tokens=10, **by))
    assert torch.equal(plain, greedy(pair(name).stock, ids, max_new_tokens=10))


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral-window"])
@pytest.mark.parametrize("settings", [dict(num_beams=3), dict(num_beams=4, num_return_sequences=2, length_penalty=0.5)])
def test_beams_from_a_padded_batch(name: str, settings: dict[str, Any]) -> None:
    assert torch.equal(*(greedy(model, tokens(), attention_mask=padding("left"), **settings) for model in pair(name)))


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral-window"])
def test_a_prefix_is_computed_once_and_reused(name: str) -> None:
    stock, ours = pair(name)
    prefix, ends = tokens(1, 6), (tokens(1, 4, seed=1), tokens(1, 7, seed=2))
    shared = DynamicCache(config=ours.config)
    with torch.no_grad():
        ours(input_ids=prefix, past_key_values=shared, use_cache=True)
    for end in ends:
        whole = torch.cat([prefix, end], dim=1)
        assert torch.equal(greedy(ours, whole, past_key_values=copy.deepcopy(shared)), greedy(stock, whole))


def test_several_turns_with_one_static_cache() -> None:
    turns = []
    for model in pair("llama"):
        cache = StaticCache(config=model.config, max_cache_len=48)
        ids = tokens(1, 5)
        for seed in (1, 2):
            turn = torch.cat([ids, tokens(1, 4, seed=seed)], dim=1)
            ids = greedy(model, turn, past_key_values=cache, disable_compile=True)
        turns.append(ids)
    assert torch.equal(*turns)


@needs_tracing
@pytest.mark.parametrize(
    ("name", "side"), [("llama", "ones"), ("llama", "left"), ("gpt2", "left"), ("gemma3-hybrid", "left")]
)
def test_compiled_generation_is_a_graph_for_all_steps(name: str, side: str) -> None:
    stock, ours = pair(name)
    settings = {"attention_mask": padding(side), "max_new_tokens": 8, "cache_implementation": "static"}
    graphs = Graphs()
    found = greedy(ours, tokens(), compile_config=compiled_by(graphs), **settings)
    assert torch.equal(found, greedy(stock, tokens(), disable_compile=True, **settings))
    # a sliding layer counts its tokens in Python: a second graph past the window, under stock attention, too
    assert len(graphs.found) == (2 if name == "gemma3-hybrid" else 1)
    assert graphs.asks_of_the_host == []
