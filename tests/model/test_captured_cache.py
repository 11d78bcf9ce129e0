"""Generation with codes whose length is reserved: one graph for all tokens and all generations, which asks no host."""

from typing import Any

import pytest
import torch

from adaattn_hf import AdaAttnCache, load_cache, save_cache
from adaattn_hf.attention.stored import FORMATS
from adaattn_hf.patches.mask import masks

from ..support.cached import ids as tokens_of
from ..support.cached import llama
from ..support.compiled import Graphs, choose_as_on_a_device, compiled_by
from ..support.versions import needs_tracing
from ..unit.test_triton import interpreted
from .test_streaming_cache import llama as planned

pytestmark = needs_tracing
ROOM = 64


@pytest.fixture
def model() -> Any:
    return llama()


def inputs(prompt: int = 20) -> dict[str, torch.Tensor]:
    ids = tokens_of(2, prompt)
    mask = torch.ones_like(ids)
    mask[1, : prompt // 4] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generated(
    model: Any, cache: Any, backend: Any = None, prompt: int = 20, count: int = 10, fullgraph: bool = True
) -> Any:
    """Greedy tokens and their logits `[count, 2, vocabulary]`, by compiled steps where a backend of torch is named."""
    options: dict[str, Any] = {} if backend is None else {"compile_config": compiled_by(backend)}
    if not fullgraph:
        options["compile_config"].fullgraph = False
    with torch.no_grad():
        found = model.generate(
            **inputs(prompt), past_key_values=cache, max_new_tokens=count, do_sample=False, output_logits=True,
            return_dict_in_generate=True, **options,
        )  # fmt: skip
    return found.sequences, torch.stack(found.logits)


@pytest.mark.parametrize("prompt", [3, 20])
@pytest.mark.parametrize("stored", FORMATS)
def test_one_graph_serves_every_token_of_every_generation(model: Any, stored: str, prompt: int) -> None:
    expected, logits = generated(model, AdaAttnCache(model, stored), prompt=prompt)
    graphs = Graphs()
    for _ in range(2):
        cache = AdaAttnCache(model, stored, max_cache_len=ROOM)
        assert cache.is_compileable
        found, answers = generated(model, cache, graphs, prompt)
        assert torch.equal(found, expected)
        # of three tokens the growing cache takes off no mean
        torch.testing.assert_close(answers, logits, rtol=0, atol=1e-5 if prompt > 16 else 0.02)
        assert int(cache.get_seq_length()) == prompt + 9
    assert len(graphs.found) == 1
    assert graphs.called.count("adaattn_hf.store_tokens.default") == model.config.num_hidden_layers
    assert graphs.asks_of_the_host == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_inductor_writes_the_codes_where_they_are(model: Any) -> None:
    expected, logits = generated(model, AdaAttnCache(model, "int8"))
    found, answers = generated(model, AdaAttnCache(model, "int8", max_cache_len=ROOM), "inductor")
    assert torch.equal(found, expected)
    torch.testing.assert_close(answers, logits, rtol=0, atol=1e-5)


@interpreted
@pytest.mark.parametrize("stored", FORMATS)
def test_on_a_device_the_kernel_reads_codes_in_the_graph(
    model: Any, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_read = masks._is_read
    choose_as_on_a_device(monkeypatch)
    monkeypatch.setattr(masks, "_is_read", lambda structure, _, config: is_read(structure, "cuda", config))
    for one, launches, how in (model, 2, {}), (planned(), 5, {"streaming": True}):
        expected, logits = generated(one, AdaAttnCache(one, stored, **how), prompt=60, count=4)
        graphs = Graphs()
        cache = AdaAttnCache(one, stored, max_cache_len=ROOM, **how)
        found, answers = generated(one, cache, graphs, prompt=60, count=4)
        assert torch.equal(found, expected)
        torch.testing.assert_close(answers, logits, rtol=0, atol=0.02 if how else 1e-3)
        assert graphs.called.count("adaattn_hf.triton_step.default") == launches


@pytest.mark.parametrize("stored", FORMATS)
def test_the_host_goes_on_where_a_graph_has_written(model: Any, stored: str) -> None:
    """Tokens by a compiled step, then several at once, then some taken off: as in a cache that grows."""
    given = inputs()
    ids = given["input_ids"]
    caches = AdaAttnCache(model, stored, max_cache_len=ROOM), AdaAttnCache(model, stored)
    steps = torch.compile(model, backend="eager", fullgraph=True), model
    logits = []
    for cache, step in zip(caches, steps, strict=True):
        with torch.no_grad():
            model(ids, past_key_values=cache)
            for place in (20, 21):
                step(ids[:, :1], position_ids=torch.full((2, 1), place), past_key_values=cache)
            several = model(ids[:, :5], past_key_values=cache).logits
            cache.crop(-2)
            one = model(ids[:, :1], past_key_values=cache).logits
        assert int(cache.get_seq_length()) == 26
        logits.append(torch.cat([several, one], dim=1))
    torch.testing.assert_close(*logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("change", ["select", "load"])
def test_what_a_graph_reads_stays_where_it_is_behind_a_change(model: Any, change: str, tmp_path: Any) -> None:
    """Other tensors are marked as the first ones were: a graph would copy them before each replay."""
    cache = AdaAttnCache(model, "int8", max_cache_len=ROOM)
    with torch.no_grad():
        model(inputs()["input_ids"], past_key_values=cache)
    if change == "select":
        cache.reorder_cache(torch.tensor([1, 0]))
    else:
        save_cache(cache, tmp_path / "cache")
        cache = load_cache(tmp_path / "cache", model, max_cache_len=ROOM)
    (store,) = cache.layers[0].stores()
    kept = store.count, *store.rooms.values(), *store.beside.values()
    assert store.beside.keys() == {"mean", "first", "along"}
    assert all(getattr(tensor, "_dynamo_static_input_type", None) for tensor in kept)


def test_a_token_too_many_is_refused_in_a_graph_too(model: Any) -> None:
    ids = inputs()["input_ids"]
    cache = AdaAttnCache(model, "int8", max_cache_len=21)
    step = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        step(ids[:, :1], position_ids=torch.full((2, 1), 20), past_key_values=cache)
        with pytest.raises(RuntimeError, match="max_cache_len: the cache is full"):
            step(ids[:, :1], position_ids=torch.full((2, 1), 21), past_key_values=cache)


def test_a_prompt_of_inference_mode_is_gone_on_with_outside_of_it(model: Any) -> None:
    ids = inputs()["input_ids"]
    logits = []
    for mode in (torch.inference_mode, torch.no_grad):
        cache = AdaAttnCache(model, "int8", max_cache_len=ROOM)
        with mode():
            model(ids, past_key_values=cache)
        with torch.no_grad():
            logits.append(model(ids[:, :1], past_key_values=cache).logits)
    assert torch.equal(*logits)


@pytest.mark.parametrize("stored", FORMATS)
def test_streaming_heads_step_in_one_graph_and_go_round_their_rings(stored: str) -> None:
    """One row begins with padding, so that its sinks were saved; rings of 36 and 20 slots are passed by 60 tokens."""
    model = planned()
    expected, logits = generated(model, AdaAttnCache(model, stored, streaming=True), prompt=60, count=40)
    graphs = Graphs()
    for _ in range(2):
        cache = AdaAttnCache(model, stored, streaming=True, max_cache_len=2 * ROOM)
        assert cache.is_compileable
        found, answers = generated(model, cache, graphs, 60, 40)
        assert torch.equal(found, expected)
        torch.testing.assert_close(answers, logits, rtol=0, atol=0.02)
        assert int(cache.get_seq_length()) == 99
    assert len(graphs.found) == 1
    assert graphs.called.count("adaattn_hf.store_tokens.default") == 5
    assert graphs.asks_of_the_host == []


@pytest.mark.parametrize(("prompt", "padded"), [(20, False), (20, True), (60, False)])
def test_rings_fill_up_in_graphs_but_not_where_sinks_have_yet_to_be_saved(prompt: int, padded: bool) -> None:
    model, given = planned(), inputs(prompt)
    if not padded:
        given["attention_mask"] = torch.ones_like(given["attention_mask"])
    found = []
    for room in (None, 2 * ROOM):
        cache = AdaAttnCache(model, "int8", streaming=True, max_cache_len=room)
        step = model if room is None else torch.compile(model, backend="eager", fullgraph=not padded)
        logits = []
        with torch.no_grad():
            model(**given, past_key_values=cache)
            for place in range(prompt, prompt + 30):
                more = torch.ones(2, place + 1 - prompt, dtype=torch.long)
                mask = torch.cat([given["attention_mask"], more], dim=1)
                positions = torch.full((2, 1), place)
                ids = given["input_ids"][:, :1]
                logits.append(step(ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits)
            logits.append(model(given["input_ids"][:, :7], past_key_values=cache).logits[:, -1:])
        found.append(torch.cat(logits, dim=1))
    torch.testing.assert_close(*found, rtol=0, atol=0.02)


def test_streaming_heads_stay_outside_of_graphs_beyond_what_their_plan_speaks_for() -> None:
    model = planned(limit=100)
    assert AdaAttnCache(model, "int8", streaming=True, max_cache_len=100).is_compileable
    assert not AdaAttnCache(model, "int8", streaming=True, max_cache_len=101).is_compileable


def test_caches_whose_heads_or_layers_differ_stay_outside_of_graphs(model: Any) -> None:
    assert not AdaAttnCache(model, "int8").is_compileable
    assert not AdaAttnCache(model, "model", max_cache_len=ROOM).is_compileable
