"""The quantised cache in models: as near to the exact one as its rounding, in every way in which caches are used."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

import adaattn_hf
from adaattn_hf.attention.kind import CallKind
from adaattn_hf.attention.listeners import listening
from adaattn_hf.backends.select import refusals_of
from adaattn_hf.patches.cache.caches import AdaAttnCache
from adaattn_hf.patches.cache.formats import SMOOTHED, StoredTensor
from adaattn_hf.patches.cache.layers import CachedLayer
from adaattn_hf.patches.cache.store import Room
from studies.cache_speed import held_bytes

from ..support.cached import MODELS, ids, llama, mistral, run
from ..support.families import sharing
from ..support.models import fresh_pair
from ..support.recorder import Recorder

FORMATS = ("int8", "k8v4")
# largest difference of logits, over their standard deviation; measured 0.012 and 0.19
NEAR = {"int8": 0.03, "k8v4": 0.4}


def distance(ours: Tensor, exact: Tensor) -> float:
    return float((ours - exact).abs().max() / exact.std())


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("family", MODELS)
def test_prompt_pieces_and_single_tokens_come_near_the_exact_model(family: str, stored: str) -> None:
    model, tokens = MODELS[family](), ids(2, 60)
    with torch.no_grad():
        exact = model(tokens, use_cache=False).logits
    ours = run(model, tokens, AdaAttnCache(model, stored), 20, 13, 1, 1, 1, 24)
    assert torch.equal(ours[:, :20], exact[:, :20]) or distance(ours[:, :20], exact[:, :20]) < 1e-5
    assert 1e-5 < distance(ours, exact) < NEAR[stored]


def test_a_prompt_of_single_tokens_is_smoothed_as_soon_as_there_are_tokens_enough() -> None:
    model, tokens = llama(), ids(1, 40)
    cache = AdaAttnCache(model, "int8")
    with torch.no_grad():
        exact = model(tokens, use_cache=False).logits
    before = run(model, tokens, cache, *[1] * (SMOOTHED - 1))
    layer: Any = cache.layers[0]
    assert "mean" not in layer.store.per_sequence
    after = run(model, tokens, cache, *[1] * (41 - SMOOTHED))
    assert "mean" in layer.store.per_sequence
    assert distance(torch.cat([before, after], 1), exact) < NEAR["int8"]


def test_a_prompt_is_rounded_for_the_queries_that_came_with_it() -> None:
    """By its attention, in the same call; what a query is like is not known before."""
    model, tokens = llama(), ids(2, 60)
    told: list[Tensor] = []
    hook = model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *a: told.append(a[2]))
    cache, short = AdaAttnCache(model, "int8"), AdaAttnCache(model, "int8")
    run(model, tokens, cache, 40)
    hook.remove()
    layer: Any = cache.layers[0]
    assert layer.store.per_sequence["along"].shape == (2, 2, 32)
    plain: Any = CachedLayer("int8")
    keys = torch.randn(2, 2, 40, 32, generator=torch.Generator().manual_seed(2))
    prompt, _ = plain.update(keys, keys)
    assert prompt.codes is keys
    before = plain.keys.codes.clone()
    queries = told[0].view(2, 40, 4, 32).transpose(1, 2)
    prompt.prompt.reread(queries, keys)
    assert not torch.equal(before, plain.keys.codes)
    plain.store.to("meta")  # as a cache that offloads does before attention has the prompt
    plain.reread(queries, keys)
    assert plain.store.per_sequence["along"].device.type == "meta"
    run(model, tokens, short, SMOOTHED - 1, 20)
    few: Any = short.layers[0]
    assert "along" not in few.store.per_sequence
    run(model, tokens, cache, 20)
    cache.reset()
    run(model, tokens[:1], cache, 30, 5)
    assert layer.store.per_sequence["along"].shape == (1, 2, 32)


@pytest.mark.parametrize("stored", FORMATS)
def test_left_padded_rows_come_near_their_unpadded_selves(stored: str) -> None:
    model, tokens = llama(), ids(2, 40)
    mask = torch.ones_like(tokens)
    mask[0, :9] = 0
    with torch.no_grad():
        alone = model(tokens[:1, 9:], use_cache=False).logits
    ours = run(model, tokens, AdaAttnCache(model, stored), 30, *[1] * 10, mask=mask)
    assert distance(ours[:1, 30:], alone[:, -10:]) < NEAR[stored]


@pytest.mark.parametrize("how", [
    {"do_sample": False}, {"do_sample": False, "num_beams": 3},
    {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    {"do_sample": False, "prompt_lookup_num_tokens": 3}, {"do_sample": False, "prefill_chunk_size": 8},
], ids=["greedy", "beams", "sequences", "prompt-lookup", "chunked-prefill"])  # fmt: skip
@pytest.mark.parametrize("family", MODELS)
def test_generation_runs_over_stored_keys_alone(family: str, how: dict[str, Any]) -> None:
    model = MODELS[family]()
    batch = 1 if "prompt_lookup_num_tokens" in how else 2
    tokens = ids(batch, 20)
    seen = Recorder()
    with listening(seen):
        out = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=24, pad_token_id=0, eos_token_id=None,
            past_key_values=AdaAttnCache(model, "int8"), **how,
        )  # fmt: skip
    assert out.shape == (batch * how.get("num_return_sequences", 1), 44)
    first, *rest = (kind for _, kind, _ in seen.calls)
    assert first.stored is None
    assert {kind.stored for kind in rest[1:]} == {"int8"}


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    model, tokens = llama(), ids(3, 30)
    together = run(model, tokens, AdaAttnCache(model, "int8"), 20, 5, 5)
    alone = run(model, tokens[1:2], AdaAttnCache(model, "int8"), 20, 5, 5)
    torch.testing.assert_close(together[1:2], alone, atol=2e-5, rtol=0)


@pytest.mark.parametrize("recorded", [False, True], ids=["window", "recorded"])
@pytest.mark.parametrize("stored", ["model", *FORMATS])
def test_a_saved_window_goes_on_where_it_was(tmp_path: Path, stored: str, recorded: bool) -> None:
    """Also where more than the window was kept, for tokens that might have been taken back."""
    model, tokens = mistral(), ids(2, 60)
    cache = AdaAttnCache(model, stored)
    run(model, tokens, cache, 20)
    if recorded:
        cache.activate_past_recording()
    run(model, tokens, cache, 20)
    path = adaattn_hf.save_cache(cache, tmp_path / "prompt.safetensors")
    read = adaattn_hf.load_cache(path, model)
    assert read.get_seq_length() == 40
    assert torch.equal(run(model, tokens, read, 1, 10), run(model, tokens, cache, 1, 10))


def saved(model: Any, path: Path, *bound: Any) -> Path:
    cache = AdaAttnCache(model, "int8")
    run(model, ids(1, 8), cache, 8)
    return adaattn_hf.save_cache(cache, path, *bound)


def test_a_file_of_other_weights_is_refused_where_it_knows_them(tmp_path: Path) -> None:
    model = llama()
    path = saved(model, tmp_path / "a", model)
    assert adaattn_hf.load_cache(path, model).get_seq_length() == 8
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
    with pytest.raises(ValueError, match=r"with other weights \(fine-tuned, another checkpoint\)"):
        adaattn_hf.load_cache(path, model)


def test_a_file_of_a_model_of_another_kind_size_or_window_is_refused(tmp_path: Path) -> None:
    kind, size = llama(), llama()
    kind.config.model_type = "mistral"
    size.config.num_key_value_heads = 1
    for made, asked, words in (
        (llama(), kind, "made for a model with model_type 'llama', expected model_type 'mistral' of"),
        (llama(), size, r"num_key_value_heads \d, expected num_key_value_heads 1 of this Llama"),
        (mistral(), mistral(sliding_window=30), "a layer 0 with window 24, expected 30"),
    ):
        with pytest.raises(ValueError, match=words):
            adaattn_hf.load_cache(saved(made, tmp_path / "a"), asked)


def bytes_of(one: Any) -> int:
    return held_bytes(SimpleNamespace(layers=[one]))


@pytest.mark.parametrize(("stored", "smaller"), [("int8", 1.95), ("k8v4", 2.6)])
def test_a_token_takes_the_bytes_that_are_promised(stored: str, smaller: float) -> None:
    """Heads of 64 channels against 16 bits."""
    keys, layer = torch.randn(1, 2, 1000, 64), CachedLayer(stored, Room(reserve=1000))
    layer.update(keys, keys)
    assert 2 * 2 * 64 * 2 * 1000 / bytes_of(layer) >= smaller * 0.999


@torch.no_grad()
@pytest.mark.parametrize(("stored", "channel"), [("model", 4), ("int8", 65 / 64)])
def test_a_sliding_layer_keeps_its_window_and_gives_back_what_a_long_prompt_took(stored: str, channel: float) -> None:
    layer = CachedLayer(stored, sliding_window=33)
    prompt, token = torch.randn(1, 2, 4000, 64), torch.randn(1, 2, 1, 64)
    for _ in range(2):
        layer.update(prompt, prompt)
        assert layer.keys.shape[2] == 32
        assert bytes_of(layer) <= 2.6 * 128 * 2 * 2 * 64 * channel
    for _ in range(500):
        keys, _ = layer.update(token, token)
        assert keys.shape[2] == 33
    assert bytes_of(layer) <= 2.6 * 128 * 2 * 2 * 64 * channel


@pytest.mark.parametrize("stored", FORMATS)
def test_prepare_gives_generate_and_pipelines_the_cache(stored: str) -> None:
    model, tokens = llama(), ids(2, 20)
    adaattn_hf.prepare(model, cache=stored)
    seen = Recorder()
    with listening(seen):
        model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=4, do_sample=False)
    assert [kind.stored for _, kind, _ in seen.calls] == [None] * 2 + [stored] * 6
    adaattn_hf.restore(model)
    seen = Recorder()
    with listening(seen):
        model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=4, do_sample=False)
    assert {kind.stored for _, kind, _ in seen.calls} == {None}


def test_what_cannot_be_served_is_refused_by_name() -> None:
    model = llama()
    with pytest.raises(TypeError, match=r"model: got LlamaConfig, expected the loaded Transformers model"):
        AdaAttnCache(model.config)
    with pytest.raises(RuntimeError, match="have no gradient"):
        model(ids(1, 4), past_key_values=AdaAttnCache(model))
    with pytest.raises(ValueError, match=r"cache: got 'int4', expected one of model, int8, k8v4"):
        AdaAttnCache(model, "int4")
    with pytest.raises(ValueError, match="attn_implementation='sdpa', which cannot read codes"):
        AdaAttnCache(llama("sdpa"))
    with pytest.raises(ValueError, match="encoder-decoder"):
        AdaAttnCache(fresh_pair("t5").ours)
    with pytest.raises(adaattn_hf.PrepareError, match="keeps no keys and values"):
        adaattn_hf.prepare(fresh_pair("bert").ours, cache="int8", unpad=False)


@pytest.mark.parametrize(("room", "words"), [
    ({"growth": 1.0}, r"growth: got 1\.0, expected a factor larger than 1"),
    ({"reserve": -1}, "reserve: got -1, expected a number of tokens, 0 or more"),
    ({"growth": "2"}, "growth: got '2', expected a factor"),
    ({"reserve": 3.5}, r"reserve: got 3\.5, expected a number of tokens"),
    ({"max_cache_len": 0}, "max_cache_len: got 0, expected a number of tokens, 1 or more; leave it out"),
    ({"max_cache_len": 9, "reserve": 10}, "got 9, expected a number of tokens, 10 or more, as reserve says"),
    ({"offloading": True}, "offloading: got True for a model on cpu, expected one on a CUDA device"),
])  # fmt: skip
def test_what_a_cache_cannot_have_is_refused_before_a_token_comes(room: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AdaAttnCache(llama(), **room)


def test_small_heads_are_refused_four_bits() -> None:
    with pytest.raises(ValueError, match="groups of 32 channels, this model's values have 8"):
        AdaAttnCache(fresh_pair("llama").ours, "k8v4")
    layer, head = CachedLayer("k8v4"), torch.zeros(1, 2, 3, 8)
    with pytest.raises(ValueError, match="groups of 32 channels"):
        layer.update(head, head)


def test_whoever_computes_with_the_codes_is_told_what_to_do() -> None:
    keys, layer = torch.randn(1, 2, 3, 32), CachedLayer("int8")
    for carrier in (layer.update(keys, keys)[0], layer.keys):
        assert isinstance(carrier, StoredTensor)
        assert carrier.shape == keys.shape
        computed: Any = (lambda it: torch.cat([it, keys]), lambda it: it.transpose(1, 2), lambda it: it[:, :1])
        for compute in (*computed, lambda it: it == it, lambda it: 2 / it, lambda it: keys @ it, np.asarray, len, bool):
            with pytest.raises(TypeError, match="a quantised cache holds codes, not numbers"):
                compute(carrier)


@pytest.mark.parametrize("name", ["sdpa", "fa2"])
def test_backends_that_cannot_read_codes_say_so(name: str) -> None:
    seen = Recorder()
    model, tokens = llama(), ids(1, 20)
    with listening(seen):
        run(model, tokens, AdaAttnCache(model), 10, 10)
    kind: CallKind = seen.calls[-1][1]
    assert any("have no keys and values stored as codes" in reason for reason in refusals_of(name, kind))
    assert "keys and values stored as int8" in kind.words()


def test_the_eager_backend_reads_what_the_kernels_read() -> None:
    model, tokens = llama(), ids(2, 40)
    ours = run(model, tokens, AdaAttnCache(model), 20, 1, 19)
    model.set_attn_implementation("adaattn_eager")
    theirs = run(model, tokens, AdaAttnCache(model), 20, 1, 19)
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=0)


def test_explain_says_what_reads_the_codes_and_what_they_take() -> None:
    model, tokens = llama(), ids(2, 40)
    explained = adaattn_hf.explain(model, cache="int8")
    (decode,) = {(choice.backend, choice.kind.stored) for choice in explained.layers if choice.phase == "decode"}
    assert decode[1] == "int8"
    assert "bytes per token as int8, 3.88 times less" in str(explained)  # 32 channels in fp32 and one byte of scale
    cache = AdaAttnCache(model, "int8", reserve=40)
    run(model, tokens, cache, 20, 20)
    measured = held_bytes(cache)
    assert explained.cache is not None
    assert measured == pytest.approx(explained.cache.predict(2, 40), rel=0.05)
    plain = adaattn_hf.explain(model).cache
    assert plain is not None
    assert (plain.per_token, plain.smaller) == (2 * 2 * 2 * 32 * 4, 1.0)


def test_explain_counts_a_window_once() -> None:
    memory = adaattn_hf.explain(mistral(), cache="int8").cache
    assert memory is not None
    assert memory.predict(1, 1000) == memory.predict(1, 23)


@pytest.mark.parametrize("name", ["Gemma4", "Gemma3n"])
def test_layers_that_read_the_keys_of_others_read_codes(name: str) -> None:
    stock, model = sharing(name)
    tokens = ids(2, 20)
    exact, answers = run(stock, tokens, DynamicCache(config=stock.config), 12, 1, 7), []
    for attention in ("adaattn", "adaattn_eager"):
        model.set_attn_implementation(attention)
        cache = AdaAttnCache(model, "int8")
        answers.append(run(model, tokens, cache, 12, 1, 7))
        assert [layer.is_sliding for layer in cache.layers[:2]] == [True, False]
        assert {type(layer) for layer in cache.layers[:2]} == {CachedLayer}
    torch.testing.assert_close(answers[0], answers[1], atol=5e-4, rtol=0)
    assert 0 < (answers[0] - exact).square().mean().sqrt() < 0.1 * exact.std()


def test_prompt_lookup_asks_for_the_room_that_stock_asks_for() -> None:
    model, tokens = llama(), ids(1, 3).repeat(1, 4)
    flow: dict[str, Any] = dict(max_new_tokens=2, do_sample=False, prompt_lookup_num_tokens=3)
    # before 5.24 stock refuses static caches there
    with pytest.raises((IndexError, ValueError), match=r"out of bounds|not supported with Static"):
        model.generate(tokens, past_key_values=StaticCache(config=model.config, max_cache_len=14), **flow)
    for stored in ("model", "int8"):
        with pytest.raises(ValueError, match="max_cache_len: got 14, expected at least 15"):
            model.generate(tokens, past_key_values=AdaAttnCache(model, stored, max_cache_len=14), **flow)
        found = model.generate(tokens, past_key_values=AdaAttnCache(model, stored, max_cache_len=15), **flow)
        assert found.shape == (1, 14)
