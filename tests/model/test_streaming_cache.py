"""Streaming heads: over a cache that forgets, the model computes what the same plan computes over a full one."""

import copy
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import adaattn_hf
from adaattn_hf.patches.cache.caches import AdaAttnCache
from adaattn_hf.patches.cache.formats import FORMATS
from adaattn_hf.patches.plans import attach
from adaattn_hf.plans.bound_layer import BoundLayer
from adaattn_hf.plans.plan import LayerPlan
from adaattn_hf.plans.tensors import LayerTensors
from studies.cache_speed import held_bytes

from ..support.cached import VOCAB, ids, run
from ..support.choices import make_choice
from ..support.command import adaattn
from ..support.plans import PROVEN, plan_for
from ..support.versions import needs_tracing

LIMIT = 600
EXACT = make_choice()
# window and sinks of two extents, one without sinks, and heads that keep everything between them
LAYERS = (
    (make_choice("window", 32, 4), EXACT, make_choice("window", 20, 0)),
    (EXACT, make_choice("window", 32, 4), make_choice("window", 32, 4)),
)
PER_TOKEN = {"model": 2 * 32 * 4, "int8": 2 * 33, "k8v4": 33 + 17}
NEAR = 2e-5


def llama(layers: Any = LAYERS, limit: int = LIMIT, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=96, intermediate_size=64, num_hidden_layers=len(layers or LAYERS), head_dim=32,
        num_attention_heads=6, num_key_value_heads=3, initializer_range=0.15, max_position_embeddings=1024,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config).eval().to(dtype)
    model.set_attn_implementation("adaattn")
    if layers is not None:
        give(model, layers, limit)
    return model


def give(model: Any, layers: Any, limit: int = LIMIT, protocol: Any = None) -> None:
    own = dict(enumerate(layers[: model.config.num_hidden_layers]))
    attach.load_plan(model, plan_for(model, own, lengths=(limit,), protocol=protocol or {}))


def model_for(stored: str) -> Any:
    """Of one layer where keys are rounded: in a second one a last bit's difference may become a step of a code."""
    return llama(LAYERS if stored == "model" else LAYERS[:1])


def caches(model: Any, stored: str) -> tuple[Any, Any]:
    return AdaAttnCache(model, stored, streaming=True), AdaAttnCache(model, stored)


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("lengths", [
    (120, *[1] * 60), (20, *[1] * 40), (*[1] * 70,), (100, 90, 1, 1, 50, 3, 1), (2, 60, 1, 2, 100),
    (33, 2, 2, 2, 2, 2),
], ids=["prompt", "short-prompt", "single", "chunks", "uneven", "at-the-brim"])  # fmt: skip
def test_decode_and_chunks_are_those_of_a_full_cache(lengths: tuple[int, ...], stored: str) -> None:
    model, tokens = model_for(stored), ids(2, 300)
    streaming, full = caches(model, stored)
    ours, theirs = run(model, tokens, streaming, *lengths), run(model, tokens, full, *lengths)
    torch.testing.assert_close(ours, theirs, atol=NEAR, rtol=0)


@pytest.mark.parametrize("stored", FORMATS)
def test_sixteen_bits(stored: str) -> None:
    """Sums in another order: a last bit of attention's output here and there."""
    model, tokens = llama(LAYERS[:1], dtype=torch.bfloat16), ids(2, 120)
    streaming, full = caches(model, stored)
    lengths = (60, 20, *[1] * 40)
    ours, theirs = (run(model, tokens, cache, *lengths).float() for cache in (streaming, full))
    torch.testing.assert_close(ours, theirs, atol=2**-6 * float(theirs.abs().max()), rtol=0)
    assert float((ours - theirs).abs().mean()) < 2**-8 * float(theirs.abs().mean())


def test_the_plan_is_at_work() -> None:
    model, tokens = llama(), ids(1, 90)
    ours = run(model, tokens, AdaAttnCache(model, "model", streaming=True), 80, 10)
    attach.remove_plan(model)
    assert float((ours - run(model, tokens, AdaAttnCache(model, "model"), 80, 10)).abs().max()) > 0.1


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("lengths", [(60, *[1] * 60), (30, 40, 1, 1, 20, *[1] * 30)], ids=["prompt", "chunks"])
def test_rows_behind_padding_keep_their_own_first_tokens(lengths: tuple[int, ...], stored: str) -> None:
    """Padding shorter than the sinks, within the window, beyond it, and longer than the first chunk."""
    model, tokens = model_for(stored), ids(5, 130)
    mask = torch.ones_like(tokens)
    for row, count in enumerate((0, 2, 23, 35, 55)):
        mask[row, :count] = 0
    streaming, full = caches(model, stored)
    ours = run(model, tokens, streaming, *lengths, mask=mask)
    theirs = run(model, tokens, full, *lengths, mask=mask)
    real = mask[:, : sum(lengths)].bool()
    torch.testing.assert_close(ours[real], theirs[real], atol=NEAR, rtol=0)


def test_a_saved_cache_of_other_windows_is_refused(tmp_path: Path) -> None:
    model, tokens = llama(), ids(1, 20)
    cache = AdaAttnCache(model, "int8", streaming=True)
    run(model, tokens, cache, 20)
    adaattn_hf.save_cache(cache, tmp_path / "prompt")
    give(model, (LAYERS[1], LAYERS[0]))
    with pytest.raises(ValueError, match=r"a layer 0 with spans .*, expected .* the plan that made it"):
        adaattn_hf.load_cache(tmp_path / "prompt", model)


@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"prefill_chunk_size": 30}], ids=["greedy", "beams", "chunks"])
def test_300_tokens_are_those_over_a_full_cache(how: dict[str, Any]) -> None:
    model, tokens = llama(), ids(2, 90)
    mask = torch.ones_like(tokens)
    mask[0, :21] = 0
    settings = dict(attention_mask=mask, max_new_tokens=300 if not how else 60, do_sample=False, pad_token_id=0)
    ours, theirs = (
        model.generate(tokens, past_key_values=cache, eos_token_id=None, **settings, **how)
        for cache in caches(model, "model")
    )
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("stored", FORMATS)
def test_what_is_held_is_what_explain_counts(stored: str) -> None:
    model, tokens = llama(), ids(2, 500)
    cache = AdaAttnCache(model, stored, reserve=500, streaming=True)
    run(model, tokens, cache, 450, *[1] * 50)
    told = adaattn_hf.explain(model, cache=stored, streaming=True).cache
    assert told is not None
    assert held_bytes(cache) == pytest.approx(told.predict(2, 500), rel=0.05)
    sums = 2 * 500 + 20 + 3 * 36  # tokens of all heads: of two that keep everything, and of four rings
    assert told.predict(1, 500) - told.per_sequence == PER_TOKEN[stored] * sums
    assert "streaming" in str(told)


def test_a_long_run_holds_no_more_than_a_short_one() -> None:
    model, tokens = llama((LAYERS[0][:1] * 3,) * 2), ids(1, 590)
    cache = AdaAttnCache(model, "int8", streaming=True)
    run(model, tokens, cache, 40)
    before = held_bytes(cache)
    run(model, tokens, cache, *[1] * 400, 150)
    assert held_bytes(cache) == before


def test_a_prepared_model_generates_behind_padding() -> None:
    model, tokens = llama(), ids(2, 80)
    mask = torch.ones_like(tokens)
    mask[0, :45] = 0  # behind the window of some heads, so that sinks of this row must be saved
    settings: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(tokens, past_key_values=AdaAttnCache(model, "model"), **settings)
    adaattn_hf.prepare(model, streaming=True)
    out = model.generate(tokens, return_dict_in_generate=True, **settings)
    assert torch.equal(out.sequences, expected)
    assert {type(layer).__name__ for layer in out.past_key_values.layers} == {"StreamingLayer"}
    assert adaattn_hf.unpad_calls(model)["unpadded"] == 1


@pytest.mark.parametrize("streaming", [False, True], ids=["full", "streaming"])
def test_a_plan_of_windows_and_precisions_runs_over_a_cache_of_codes(streaming: bool) -> None:
    """A prompt by the plan as it is, and steps over codes with its windows: named by one argument of `prepare`."""
    layer = (
        make_choice("window", 32, 4, precision="int8"),
        make_choice("window", 32, 4, precision="bf16"),
        make_choice(precision="int8"),
    )
    model, tokens = llama((layer,)), ids(2, 120)
    exact = run(model, tokens, AdaAttnCache(model, "model"), 80, *[1] * 20)
    adaattn_hf.prepare(model, cache="int8", streaming=streaming, unpad=False)
    with torch.no_grad():
        first = model(tokens[:, :80], use_cache=True)
    assert torch.equal(first.logits, exact[:, :80])
    assert type(first.past_key_values.layers[0]).__name__ == ("StreamingLayer" if streaming else "CachedLayer")
    steps = run(model, tokens, first.past_key_values, *[1] * 20)
    difference = (steps - exact[:, 80:]).abs()
    assert 1e-5 < float(difference.mean() / exact.std()) < 0.02
    attach.remove_plan(model)
    other = run(model, tokens, AdaAttnCache(model, "int8"), 80, *[1] * 20)[:, 80:]
    assert float((steps - other).abs().mean() / exact.std()) > 0.05, "the plan's windows do nothing"


@pytest.mark.parametrize("streaming", [False, True], ids=["full", "streaming"])
@pytest.mark.parametrize("stored", FORMATS)
def test_room_that_is_made_at_once_is_all_there_will_be(stored: str, streaming: bool) -> None:
    model, tokens = llama(), ids(1, 120)
    cache = AdaAttnCache(model, stored, streaming=streaming, max_cache_len=100)
    run(model, tokens, cache, 30)
    before = held_bytes(cache)
    run(model, tokens, cache, 60, *[1] * 10)
    assert held_bytes(cache) == before
    assert cache.layers[0].get_max_length() == 100
    with pytest.raises(ValueError, match="max_cache_len: got 100, expected at least 101"):
        run(model, tokens, cache, 1)


def test_a_cache_is_what_its_plan_was_proven_with() -> None:
    model, tokens = llama(), ids(1, 40)
    assert (AdaAttnCache(model).stored, AdaAttnCache(model).streaming) == ("int8", False)
    give(model, LAYERS, protocol={"cache": {"stored": "k8v4", "streaming": True, "verified": asdict(PROVEN)}})
    proven = AdaAttnCache(model)
    assert (proven.stored, proven.streaming) == ("k8v4", True)
    run(model, tokens, proven, 30, 10)
    whole = AdaAttnCache(model, "int8")  # named, so that nothing of the proof is taken over
    assert (whole.stored, whole.streaming) == ("int8", False)
    assert AdaAttnCache(model, streaming=False).stored == "k8v4"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@needs_tracing
@pytest.mark.parametrize("stored", ["model", "int8"])
def test_a_compiled_model_reads_the_cache_between_its_graphs(stored: str) -> None:
    """Full codes round a prompt's keys in a graph without its queries: otherwise than outside, and as exactly."""
    model, tokens = llama(LAYERS[:1]), ids(1, 82)
    exact, expected = (run(model, tokens, AdaAttnCache(model, kept), 60, 1, 20, 1) for kept in ("model", stored))
    for cache in caches(model, stored):
        torch._dynamo.reset()  # else what the first cache compiled keeps the second from being traced
        found = run(torch.compile(model, backend="eager", dynamic=True), tokens, cache, 60, 1, 20, 1)
        if stored == "int8" and not cache.streaming:
            assert 0 < (found - exact).square().mean() < 1.2 * (expected - exact).square().mean()
        else:
            torch.testing.assert_close(found, expected, atol=NEAR, rtol=0)


def test_what_streaming_heads_cannot_do_is_refused_by_name() -> None:
    model, tokens = llama(), ids(1, 60)
    adaattn_hf.prepare(model, streaming=True, unpad=False)
    offloaded = DynamicCache(config=model.config)
    offloaded.offloading = True  # asked for at once it makes a stream, which a build for CUDA cannot without a device
    with pytest.raises(ValueError, match="offloading: got True for a cache with streaming heads"), torch.no_grad():
        model(tokens, past_key_values=offloaded)
    adaattn_hf.restore(model)
    cache = AdaAttnCache(model, "model", streaming=True)
    run(model, tokens, cache, 20)
    with pytest.raises(ValueError, match="got tokens of 2 sequences for a cache that holds 1"):
        run(model, ids(2, 60), cache, 1)
    cache.crop(-5)  # nothing is gone yet
    full = AdaAttnCache(model, "model")
    run(model, tokens, full, 15)
    torch.testing.assert_close(run(model, tokens, cache, 40), run(model, tokens, full, 40), atol=NEAR, rtol=0)
    with pytest.raises(RuntimeError, match="crop: heads of this layer keep 4 first tokens and the last 32 of 55"):
        cache.crop(-1)
    mask = torch.ones(1, 56)
    mask[:, :3] = 0
    with pytest.raises(ValueError, match="attention_mask: its rows begin at"):
        run(model, tokens, cache, 1, mask=mask)
    with pytest.raises(ValueError, match="without a plan"):
        AdaAttnCache(llama(None), "int8", streaming=True)
    with pytest.raises(ValueError, match="output_attentions asks for all keys"), torch.no_grad():
        model(tokens, past_key_values=AdaAttnCache(model, "model", streaming=True), output_attentions=True)
    with pytest.raises(ValueError, match=r"adaattn_hf\.record asks for all keys"), adaattn_hf.record(model):
        run(model, tokens, AdaAttnCache(model, "model", streaming=True), 1)


@pytest.mark.parametrize("stored", ["model", "int8"])
def test_a_cache_made_without_a_configuration_streams_too(stored: str) -> None:
    model, tokens = llama(), ids(1, 60)
    expected = run(model, tokens, AdaAttnCache(model, stored, streaming=True), 50, 10)
    cache = DynamicCache()
    adaattn_hf.prepare(model, cache=stored, streaming=True)
    torch.testing.assert_close(run(model, tokens, cache, 50, 10), expected, atol=0, rtol=0)
    assert [type(layer).__name__ for layer in cache.layers] == ["StreamingLayer"] * 2


def test_a_sequence_longer_than_the_plan_speaks_for_is_refused() -> None:
    model, tokens = llama(limit=64), ids(1, 80)
    cache = AdaAttnCache(model, "int8", streaming=True)
    run(model, tokens, cache, 60, *[1] * 4)
    with pytest.raises(ValueError, match="up to 64 tokens, got 65"):
        run(model, tokens, cache, 1)


def test_a_plan_that_was_changed_meanwhile_is_refused() -> None:
    model, tokens = llama(), ids(1, 80)
    cache = AdaAttnCache(model, "model", streaming=True)
    run(model, tokens, cache, 50)
    give(model, (LAYERS[1], LAYERS[0]))
    with pytest.raises(ValueError, match="has another one now"):
        run(model, tokens, cache, 1)
    attach.remove_plan(model)
    with pytest.raises(ValueError, match="has none now"):
        run(model, tokens, cache, 1)


def test_masks_without_rules_and_gradients_are_refused() -> None:
    model, tokens = llama(), ids(1, 40)
    mask = torch.rand(1, 1, 40, 40, generator=torch.Generator().manual_seed(0)) > 0.5
    with pytest.raises(ValueError, match="dense mask without rules"), torch.no_grad():
        model(tokens, attention_mask=mask, past_key_values=AdaAttnCache(model, "model", streaming=True))
    with pytest.raises(RuntimeError, match="have no gradient"):
        model(tokens, past_key_values=AdaAttnCache(model, "model", streaming=True))


def test_choices_that_look_at_the_keys_are_refused_over_codes() -> None:
    rank = BoundLayer(LayerPlan(0, "", (make_choice(rank=16), EXACT)), LayerTensors(), LIMIT)
    with pytest.raises(ValueError, match="r16 looks at the keys themselves"):
        _ = rank.for_quantised_cache


def test_the_command_counts_streaming_heads(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path)
    asked = ["explain", str(tmp_path), "--cache", "int8", "--streaming", "--json"]
    done = adaattn(*asked)
    assert json.loads(done.stdout)["cache"]["streaming_heads"] == [4, 6]


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("before", [(50, 20), (20,), (90, 1, 1)], ids=["passed", "whole", "long"])
def test_tokens_are_taken_back_while_the_past_is_recorded(stored: str, before: tuple[int, ...]) -> None:
    """As assisted decoding does: guesses by one call or several, some of which stay."""
    model, tokens = model_for(stored), ids(2, 200)
    mask = torch.ones_like(tokens)
    mask[1, :37] = 0  # its first tokens are saved while guesses push them out
    ours = AdaAttnCache(model, stored, streaming=True)
    run(model, tokens, ours, *before, mask=mask)
    ours.activate_past_recording()
    straight = AdaAttnCache(model, stored, streaming=True)
    run(model, tokens, straight, *before, mask=mask)
    for guesses, kept in (((6,), 2), ((40,), 1), ((1, 1, 1), 2), ((5,), 5), ((3, 4), 0)):
        at = ours.get_seq_length()
        wrong = torch.cat([tokens[:, : at + kept], tokens[:, at + kept :].flip(1)], dim=1)
        run(model, wrong, ours, *guesses, mask=mask)
        ours.crop(torch.tensor(kept - sum(guesses)))  # as Transformers 5.17 counts
        if kept:
            run(model, tokens, straight, kept, mask=mask)
        assert ours.get_seq_length() == straight.get_seq_length() == at + kept
        torch.testing.assert_close(
            run(model, tokens, copy.deepcopy(ours), 1, 9, mask=mask),
            run(model, tokens, copy.deepcopy(straight), 1, 9, mask=mask), atol=NEAR, rtol=0,
        )  # fmt: skip
    run(model, tokens, ours, 1, 1, mask=mask)
    ours.batch_select_indices(torch.tensor([1]))
    with pytest.raises(RuntimeError, match=r"call activate_past_recording\(\) before them \(`generate` does so of an"):
        ours.crop(-1)


@pytest.mark.parametrize("how", ["prompt-lookup", "assistant"])
def test_assisted_decoding_gives_the_tokens_of_a_full_cache(how: str) -> None:
    model, tokens = llama(), ids(1, 90)
    lookup = how == "prompt-lookup"
    guess: dict[str, Any] = {"prompt_lookup_num_tokens": 3} if lookup else {"assistant_model": llama(None)}
    settings: dict[str, Any] = {"max_new_tokens": 80, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    ours, theirs = (model.generate(tokens, past_key_values=c, **settings, **guess) for c in caches(model, "model"))
    assert torch.equal(ours, theirs)
