"""Ways of generating beyond the usual caches: quantised and offloaded, drafts, reuse, compiled and batched steps."""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import Any

import pytest
import torch
import transformers as tf
from packaging.version import Version
from torch import Tensor
from transformers import DynamicCache, StaticCache

import adaattn_hf
from adaattn_hf.attention.reference import attention
from adaattn_hf.attention.request import AttentionRequest
from adaattn_hf.attention.structure import CallStructure
from adaattn_hf.patches.call.paged import paged_function
from adaattn_hf.patches.registry import engine_takes_names

from ..support.models import assert_same, fresh_pair, padding, pair, tokens
from ..support.versions import needs_tracing

DECODERS = ("gpt2", "llama", "mistral-window", "gemma3-hybrid")


def greedy(model: Any, ids: Tensor, **settings: Any) -> Tensor:
    """Tokens of greedy decoding."""
    settings = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids), **settings}
    with torch.no_grad():
        found: Tensor = model.generate(ids, **settings)
    return found


class Stream(contextlib.AbstractContextManager[None]):
    """In the place of a device's stream: everything is done at once."""

    def __exit__(self, *exception: object) -> None:
        return None

    def wait_stream(self, other: Any) -> None:
        return None


@pytest.mark.parametrize("name", DECODERS)
def test_offloaded_cache(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        # the cache's own code, whose copies need no waiting here
        for place, attribute in ((torch, "Stream"), (torch.cuda, "Stream"), (torch.cuda, "stream")):
            monkeypatch.setattr(place, attribute, lambda *given: Stream())
        monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream())
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
    ids = tokens()
    answers = [
        greedy(model, ids, past_key_values=tf.QuantizedCache("fp8", model.config), max_new_tokens=10)
        for model in (stock, ours)
    ]
    assert torch.equal(*answers)
    found = []
    for model in (stock, ours):
        cache = tf.QuantizedCache("fp8", model.config)
        with torch.no_grad():
            prompt = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
            step = model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True).logits
        found.append((prompt, step))
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
    if draft == "model":
        drafted = greedy(ours, ids, max_new_tokens=10, assistant_model=fresh_pair(name).ours)
    else:
        drafted = greedy(ours, ids, max_new_tokens=10, prompt_lookup_num_tokens=3)
    assert torch.equal(plain, drafted)
    assert torch.equal(plain, greedy(pair(name).stock, ids, max_new_tokens=10))


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral-window"])
@pytest.mark.parametrize(
    "settings", [dict(num_beams=3), dict(num_beams=4, num_return_sequences=2, length_penalty=0.5)]
)
def test_beams_from_a_padded_batch(name: str, settings: dict[str, Any]) -> None:
    stock, ours = pair(name)
    mask = padding("left")
    assert torch.equal(
        greedy(stock, tokens(), attention_mask=mask, **settings),
        greedy(ours, tokens(), attention_mask=mask, **settings),
    )


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral-window"])
def test_a_prefix_is_computed_once_and_reused(name: str) -> None:
    stock, ours = pair(name)
    prefix, ends = tokens(1, 6), (tokens(1, 4, seed=1), tokens(1, 7, seed=2))
    with torch.no_grad():
        shared = ours(
            input_ids=prefix, past_key_values=DynamicCache(config=ours.config), use_cache=True
        ).past_key_values
    for end in ends:
        whole = torch.cat([prefix, end], dim=1)
        reused = greedy(ours, whole, past_key_values=copy.deepcopy(shared))
        assert torch.equal(reused, greedy(stock, whole))


def test_several_turns_with_one_static_cache() -> None:
    stock, ours = pair("llama")
    turns = []
    for model in (stock, ours):
        cache = StaticCache(config=model.config, max_cache_len=48)
        ids = tokens(1, 5)
        for seed in (1, 2):
            ids = greedy(
                model,
                torch.cat([ids, tokens(1, 4, seed=seed)], dim=1),
                past_key_values=cache,
                disable_compile=True,
            )
        turns.append(ids)
    assert torch.equal(*turns)


@needs_tracing
def test_compiled_decoding_step_takes_the_same_graphs_as_stock() -> None:
    """Static cache: one graph for steps of decoding, whatever the length; prompts stay outside of the graph."""
    counts = []
    for implementation in ("sdpa", "adaattn"):
        torch._dynamo.reset()
        model = fresh_pair("llama", "adaattn").ours
        model.set_attn_implementation(implementation)
        graphs = 0

        def counted(graph: Any, inputs: Any) -> Any:
            nonlocal graphs
            graphs += 1
            return graph.forward

        cache = StaticCache(config=model.config, max_cache_len=32)
        step = torch.compile(model.forward, backend=counted)
        ids = tokens(1, 6)
        seen = []
        with torch.no_grad():
            token = model(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
            for place in range(6, 18):
                position = torch.tensor([[place]])
                behind: dict[str, Any] = dict(past_key_values=cache, position_ids=position)
                mask = tf.masking_utils.create_causal_mask(
                    config=model.config, inputs_embeds=torch.empty(1, 1, 32), attention_mask=None, **behind
                )
                logits = step(input_ids=token, attention_mask=mask, use_cache=True, **behind).logits
                token = logits[:, -1:].argmax(-1)
                seen.append(logits)
        counts.append((graphs, torch.cat(seen, dim=1)))
    torch._dynamo.reset()
    assert counts[1][0] <= counts[0][0]
    assert_same(counts[0][1], counts[1][1], rtol=2e-5)


@needs_tracing
@pytest.mark.parametrize(
    ("name", "side"), [("llama", "none"), ("llama", "left"), ("gpt2", "left"), ("gemma3-hybrid", "left")]
)
def test_compiled_generation_is_a_graph_for_all_steps(name: str, side: str) -> None:
    stock, ours = pair(name)
    mask = padding(side)
    settings: dict[str, Any] = dict(
        attention_mask=torch.ones_like(tokens()) if mask is None else mask,
        max_new_tokens=8,
        cache_implementation="static",
    )
    graphs: list[Any] = []

    def kept(graph: Any, inputs: Any, **options: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = tf.CompileConfig(backend=kept, fullgraph=True, dynamic=None, mode=None)
    compiled._compile_all_devices = True  # type: ignore[assignment]
    torch._dynamo.reset()
    found = greedy(ours, tokens(), compile_config=compiled, **settings)
    torch._dynamo.reset()
    assert torch.equal(found, greedy(stock, tokens(), disable_compile=True, **settings))
    # a sliding layer counts its tokens in Python: a second graph past the window, under stock attention, too
    assert len(graphs) == (2 if name == "gemma3-hybrid" else 1)
    # what a captured graph may not do: ask the host
    names = {str(node.target) for graph in graphs for node in graph.graph.nodes}
    assert not [n for n in names if n in ("item", "tolist", "cpu", "nonzero") or "local_scalar" in n]


def test_continuous_batching_as_the_installed_engine_allows(caplog: pytest.LogCaptureFixture) -> None:
    stock, ours = fresh_pair("llama")
    inputs = [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16, 17]]
    settings: dict[str, Any] = dict(
        inputs=inputs,
        generation_config=tf.GenerationConfig(
            max_new_tokens=6, do_sample=False, eos_token_id=63, pad_token_id=0
        ),
        continuous_batching_config=tf.ContinuousBatchingConfig(
            num_blocks=16, max_batch_tokens=64, block_size=32
        ),
        progress_bar=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not engine_takes_names():
            with pytest.raises(ValueError, match="adaattn is not supported for continuous batching"):
                ours.generate_batch(**settings)
            return
        found = [[r.generated_tokens for r in m.generate_batch(**settings).values()] for m in (stock, ours)]
        # the engine of Transformers before 5.19 logs what its thread raises, and goes on
        raises = Version(tf.__version__) >= Version("5.19")
        refused = (
            pytest.raises(Exception, match=r"use_plan: generate_batch\(\)")
            if raises
            else contextlib.nullcontext()
        )
        with refused, adaattn_hf.use_plan(ours, None):
            ours.generate_batch(**settings)
    assert raises or "use_plan: generate_batch()" in caplog.text
    assert found[0] == found[1]
    assert ours.config._attn_implementation == "adaattn"


class Paged:
    """A stand-in for the engine's cache: keys and values of all requests lie behind one another."""

    def __init__(self, key: Tensor, value: Tensor) -> None:
        self.key, self.value = key, value

    def update(self, key_states: Tensor, value_states: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.key, self.value


@pytest.mark.parametrize("window", [None, 3])
def test_a_step_of_continuous_batching_is_attention_request_by_request(window: int | None) -> None:
    module: Any = torch.nn.Module()
    module.layer_idx, module.sliding_window = 0, window
    query = torch.randn(1, 4, 8, 16)
    key, value = torch.randn(16, 2, 16), torch.randn(16, 2, 16)
    q_borders, k_borders = torch.tensor([0, 4, 5, 7]), torch.tensor([0, 4, 10, 16])
    out, _ = paged_function()(
        module,
        query,
        query[:, :2],
        query[:, :2],
        cache=Paged(key, value),
        cu_seq_lens_q=q_borders,
        cu_seq_lens_k={"full_attention": k_borders, "sliding_attention": k_borders},
        read_index=[],
        write_index=[],
    )
    for q, q_end, k, k_end in ((0, 4, 0, 4), (4, 5, 4, 10), (5, 7, 10, 16)):
        structure = CallStructure(
            1, q_end - q, k_end - k, causal=True, q_offset=(k_end - k) - (q_end - q), window=window
        )
        request = AttentionRequest(
            query[:, :, q:q_end],
            key[k:k_end].transpose(0, 1)[None],
            value[k:k_end].transpose(0, 1)[None],
            structure,
            0.25,
        )
        assert_same(attention(request).out.float(), out[:, q:q_end])
    assert not out[:, 7:].any(), "what belongs to no request is zero"


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"alibi": torch.ones(4)}, "^alibi: got Tensor from Module"),
        ({"position_bias": torch.ones(1)}, "^position_bias: got Tensor"),
        ({"sinks": torch.ones(4)}, "^sinks: got Tensor"),
        ({"attention_mask": torch.ones(1, 1, 8, 16)}, "^attention_mask: got a mask in a step"),
        ({"dropout": 0.5}, r"^dropout: got 0\.5 in a step"),
        ({"cache": None}, "steps of continuous batching"),
    ],
)
def test_what_a_step_of_continuous_batching_does_not_serve_is_refused(
    keywords: dict[str, Any], words: str
) -> None:
    """Before the cache is written to."""
    query = torch.randn(1, 4, 8, 16)
    with pytest.raises(ValueError, match=words):
        paged_function()(torch.nn.Module(), query, query, query, **{"cache": object(), **keywords})


def test_a_step_of_continuous_batching_is_not_transformed() -> None:
    def step(query: Tensor) -> Tensor:
        out: Tensor = paged_function()(torch.nn.Module(), query, query, query, cache=object())[0]
        return out

    with pytest.raises(RuntimeError, match=r"generate_batch: called under torch\.func"):
        torch.func.vmap(step)(torch.randn(2, 1, 4, 8, 16))
