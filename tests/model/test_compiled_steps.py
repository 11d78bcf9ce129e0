"""Generation with a static cache as a CUDA device compiles it: each layer's step is one node, which reads no mask."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as tf

from adaattn_hf.attention.request import CallSpec
from adaattn_hf.backends import select
from adaattn_hf.backends.triton import TritonBackend
from adaattn_hf.patches.mask import masks
from adaattn_hf.patches.plans import attach

from ..support.choices import make_choice
from ..support.models import fresh_pair, padding, tokens
from ..support.versions import needs_tracing
from ..unit.test_triton import interpreted
from .test_plan_compile import planned
from .test_plan_compile import tokens as long_tokens

pytestmark = [needs_tracing, interpreted]


@pytest.fixture(autouse=True)
def _as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced calls are chosen for as if the processor's tensors lay on a CUDA device; all others as they are."""
    refusals, order = TritonBackend.refusals, select.order

    def there(spec: CallSpec) -> CallSpec:
        return spec._replace(device="cuda") if spec.compiling else spec

    monkeypatch.setattr(TritonBackend, "refusals", lambda self, spec: refusals(self, there(spec)))
    monkeypatch.setattr(select, "order", lambda spec: order(there(spec)))
    torch._dynamo.reset()


def generate(model: Any, ids: torch.Tensor, graphs: list[Any], **settings: Any) -> torch.Tensor:
    """Greedy tokens with a static cache, by steps that are compiled; their graphs are kept."""

    def kept(graph: Any, inputs: Any, **options: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = tf.CompileConfig(backend=kept, fullgraph=True, dynamic=None, mode=None)
    compiled._compile_all_devices = True  # type: ignore[assignment]
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False, **settings}
    with torch.no_grad():
        found: torch.Tensor = model.generate(ids, cache_implementation="static", compile_config=compiled, **given)
    return found


def called(graphs: list[Any]) -> list[str]:
    """What the nodes of graphs call."""
    return [str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize(("name", "side"), [("llama", "none"), ("gpt2", "left"), ("gemma3-hybrid", "left")])
def test_a_step_is_one_node_a_layer(name: str, side: str) -> None:
    stock, ours = fresh_pair(name)
    ids, mask = tokens(), padding(side)
    given = {} if mask is None else {"attention_mask": mask}
    graphs: list[Any] = []
    found = generate(ours, ids, graphs, **given)
    with torch.no_grad():
        expected = stock.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    assert torch.equal(found, expected)
    layers = ours.config.num_hidden_layers
    names = called(graphs)
    assert names.count("adaattn_hf.triton_step.default") == layers * len(graphs)
    assert not [n for n in names if "scaled_dot_product" in n or n.endswith(".item") or "local_scalar" in n]


def test_a_mask_that_is_made_inside_the_graph_stays_a_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    is_read = masks._is_read
    monkeypatch.setattr(masks, "_is_read", lambda structure, device, config: is_read(structure, "cuda", config))
    stock, ours = fresh_pair("llama")
    ids, mask = tokens(), padding("left")
    assert mask is not None
    logits, graphs = [], []
    for model in (stock, ours):

        def kept(graph: Any, inputs: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        cache = tf.StaticCache(config=model.config, max_cache_len=40)
        step = torch.compile(model, backend=kept, fullgraph=True) if model is ours else model
        with torch.no_grad():
            model(ids, attention_mask=mask, past_key_values=cache)
            last = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            place = last.sum(1, keepdim=True) - 1
            logits.append(step(ids[:, :1], attention_mask=last, position_ids=place, past_key_values=cache).logits)
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)
    assert called(graphs).count("adaattn_hf.triton_step.default") == ours.config.num_hidden_layers, called(graphs)


@pytest.mark.parametrize("choice", [make_choice("window", 32, 4), make_choice(precision="bf16")], ids=lambda c: c.label)
def test_so_is_a_step_under_a_plan(choice: Any) -> None:
    model = planned(choice)
    ids = long_tokens(2)
    mask = torch.ones_like(ids)
    mask[1, :60] = 0
    graphs: list[Any] = []
    found = generate(model, ids, graphs, attention_mask=mask)
    with torch.no_grad():
        expected = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    assert torch.equal(found, expected)
    names = called(graphs)
    assert names.count("adaattn_hf.triton_step.default") == model.config.num_hidden_layers
    attach.remove_plan(model)
    with torch.no_grad():
        exact = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    assert torch.equal(found, exact) == (choice.label == "bf16")


def test_a_cache_with_room_for_more_than_the_plan_speaks_for() -> None:
    """Steps of one graph: under the plan up to its length, and exact behind it."""
    model = planned(make_choice("window", 4))
    plan = attach.plan_of(model)
    assert plan is not None
    attach.attach(model, replace(plan, lengths=(204,)), unverified=True)
    graphs: list[Any] = []
    found = generate(model, long_tokens(), graphs)
    with torch.no_grad():
        expected = model.generate(long_tokens(), max_new_tokens=8, do_sample=False)
    assert torch.equal(found, expected)
    assert called(graphs).count("adaattn_hf.triton_step.default") == model.config.num_hidden_layers
    attach.attach(model, plan, unverified=True)
    with torch.no_grad():
        longer = model.generate(long_tokens(), max_new_tokens=8, do_sample=False)
    assert not torch.equal(found, longer), "the plan's length changes nothing"


def test_what_one_launch_cannot_say_stays_the_plans_own_node() -> None:
    graphs: list[Any] = []
    model = planned(make_choice(rank=6))
    found = generate(model, long_tokens(), graphs)
    with torch.no_grad():
        expected = model.generate(long_tokens(), max_new_tokens=8, do_sample=False)
    assert torch.equal(found, expected)
    assert "adaattn_hf.triton_step.default" not in called(graphs)
    assert "adaattn_hf.planned.default" in called(graphs)
