"""Generation with codes whose length is reserved: one graph for all tokens and all generations, which asks no host."""

from typing import Any

import pytest
import torch

from adaattn_hf import AdaAttnCache, load_cache, save_cache
from adaattn_hf.patches.mask import masks

from ..support.cached import ids as tokens_of
from ..support.cached import llama, run
from ..support.compiled import Graphs, choose_as_on_a_device, compiled_by
from ..support.versions import needs_tracing
from ..unit.test_triton import interpreted
from .test_streaming_cache import LAYERS
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


def generated(model: Any, cache: Any, backend: Any = None, prompt: int = 20, count: int = 10) -> Any:
    """Greedy tokens and their logits `[count, 2, vocabulary]`, by compiled steps where a backend of torch is named."""
    options: dict[str, Any] = {} if backend is None else {"compile_config": compiled_by(backend)}
    with torch.no_grad():
        found = model.generate(
            **inputs(prompt), past_key_values=cache, max_new_tokens=count, do_sample=False, output_logits=True,
            return_dict_in_generate=True, **options,
        )  # fmt: skip
    return found.sequences, torch.stack(found.logits)


@pytest.mark.parametrize(
    ("stored", "prompt", "count", "streaming"),
    [("int8", 3, 10, False), ("k8v4", 20, 10, False), ("k8v4", 60, 40, True)],
)
def test_one_graph_serves_every_token_of_all_generations(stored: str, prompt: int, count: int, streaming: bool) -> None:
    """With streaming heads their rings of 36 and 20 slots are passed by 60 tokens, and padding's sinks were saved."""
    model = planned() if streaming else llama()
    expected, logits = generated(model, AdaAttnCache(model, stored, streaming=streaming), prompt=prompt, count=count)
    graphs = Graphs()
    for _ in range(2):
        cache = AdaAttnCache(model, stored, streaming=streaming, max_cache_len=2 * ROOM)
        assert cache.is_compileable
        found, answers = generated(model, cache, graphs, prompt, count)
        assert torch.equal(found, expected)
        # of three tokens the growing cache takes off no mean
        torch.testing.assert_close(answers, logits, rtol=0, atol=1e-5 if prompt == 20 else 0.02)
        assert int(cache.get_seq_length()) == prompt + count - 1
    assert len(graphs.found) == 1
    assert graphs.called.count("adaattn_hf.store_tokens.default") == (5 if streaming else 2)
    assert graphs.asks_of_the_host == []


@pytest.mark.slow
def test_inductor_writes_the_codes_where_they_are() -> None:
    model = llama(num_hidden_layers=1)
    expected, logits = generated(model, AdaAttnCache(model, "int8"))
    found, answers = generated(model, AdaAttnCache(model, "int8", max_cache_len=ROOM), "inductor")
    assert torch.equal(found, expected)
    torch.testing.assert_close(answers, logits, rtol=0, atol=1e-5)


@interpreted
@pytest.mark.parametrize(("stored", "streaming"), [("k8v4", False), ("int8", True)])
def test_on_a_device_the_kernel_reads_codes_in_the_graph(
    stored: str, streaming: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_read = masks._is_read
    choose_as_on_a_device(monkeypatch)
    monkeypatch.setattr(masks, "_is_read", lambda structure, _, config: is_read(structure, "cuda", config))
    model, graphs = planned() if streaming else llama(), Graphs()
    expected, logits = generated(model, AdaAttnCache(model, stored, streaming=streaming), prompt=60, count=4)
    cache = AdaAttnCache(model, stored, streaming=streaming, max_cache_len=ROOM)
    found, answers = generated(model, cache, graphs, prompt=60, count=4)
    assert torch.equal(found, expected)
    torch.testing.assert_close(answers, logits, rtol=0, atol=0.02 if streaming else 1e-3)
    assert graphs.called.count("adaattn_hf.triton_step.default") == (5 if streaming else 2)


@pytest.mark.parametrize(("stored", "streaming", "prompt", "steps", "padding"), [
    ("k8v4", False, 20, 2, 0), ("int8", True, 16, 3, 0), ("int8", True, 20, 30, 0), ("int8", True, 20, 30, 5),
    ("int8", True, 60, 30, 0),
])  # fmt: skip
def test_the_host_goes_on_where_a_graph_has_written(
    stored: str, streaming: bool, prompt: int, steps: int, padding: int
) -> None:
    """Tokens by compiled steps, some taken off where all are there, then several at once: as in a cache that grows.

    Rings of 36 and 20 slots fill up in graphs, but not where sinks of a row behind padding have yet to be saved.
    """
    model = planned([(LAYERS[0][2], *LAYERS[0][:2])]) if streaming else llama()  # a head that keeps all is last, too
    tokens = tokens_of(2, 128)
    mask = torch.ones_like(tokens)
    mask[1, :padding] = 0
    logits = []
    for room in (None, 2 * ROOM):
        cache = AdaAttnCache(model, stored, streaming=streaming, max_cache_len=room)
        step = model if room is None else torch.compile(model, backend="eager", fullgraph=not padding)
        run(model, tokens, cache, prompt, mask=mask)
        found = run(step, tokens, cache, *[1] * steps, mask=mask)
        if steps < 20:
            cache.crop(-2)
        logits.append(torch.cat([found, run(model, tokens, cache, 7, 1, mask=mask)], dim=1))
        assert int(cache.get_seq_length()) == prompt + steps + (6 if steps < 20 else 8)
    torch.testing.assert_close(*logits, rtol=0, atol=0.02 if streaming else 1e-5)


@pytest.mark.parametrize("change", ["select", "load"])
def test_what_a_graph_reads_stays_where_it_is_behind_a_change(model: Any, change: str, tmp_path: Any) -> None:
    """Other tensors are marked as the first ones were: a graph would copy them before each replay."""
    cache = AdaAttnCache(model, "int8", max_cache_len=ROOM)
    run(model, tokens_of(2, 20), cache, 20)
    if change == "select":
        cache.reorder_cache(torch.tensor([1, 0]))
    else:
        save_cache(cache, tmp_path / "cache")
        cache = load_cache(tmp_path / "cache", model, max_cache_len=ROOM)
    (store,) = cache.layers[0].stores()
    kept = store.count, *store.rooms.values(), *store.per_sequence.values()
    assert store.per_sequence.keys() == {"mean", "first", "along"}
    assert all(getattr(tensor, "_dynamo_static_input_type", None) for tensor in kept)


def test_a_token_too_many_is_refused_in_a_graph_too(model: Any) -> None:
    tokens, cache = tokens_of(2, 22), AdaAttnCache(model, "int8", max_cache_len=21)
    step = torch.compile(model, backend="eager", fullgraph=True)
    run(model, tokens, cache, 20)
    run(step, tokens, cache, 1)
    with pytest.raises(RuntimeError, match="max_cache_len: the cache is full"):
        run(step, tokens, cache, 1)


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


def test_caches_whose_heads_or_layers_differ_stay_outside_of_graphs(model: Any) -> None:
    assert not AdaAttnCache(model, "int8").is_compileable
    assert not AdaAttnCache(model, "model", max_cache_len=ROOM).is_compileable
    model = planned(limit=100)  # beyond what its plan speaks for rows are exact
    rooms = [AdaAttnCache(model, "int8", streaming=True, max_cache_len=most) for most in (100, 101)]
    assert [room.is_compileable for room in rooms] == [True, False]
