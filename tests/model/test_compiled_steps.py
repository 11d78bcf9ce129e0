"""Generation with a static cache as a CUDA device compiles it: each layer's step is one node, which reads no mask."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as tf

from adaattn_hf.patches.mask import masks
from adaattn_hf.patches.plans import attach

from ..support.choices import make_choice
from ..support.compiled import Graphs, choose_as_on_a_device, compiled_by
from ..support.models import fresh_pair, padding, tokens
from ..support.versions import needs_tracing
from ..unit.test_triton import interpreted
from .test_plan_compile import planned
from .test_plan_compile import tokens as long_tokens

pytestmark = [needs_tracing, interpreted]
STEP = "adaattn_hf.triton_step.default"


@pytest.fixture(autouse=True)
def _as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_as_on_a_device(monkeypatch)


def generate(model: Any, ids: torch.Tensor, **settings: Any) -> torch.Tensor:
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False, **settings}
    return model.generate(ids, **given)  # type: ignore[no-any-return]


def by_graphs(model: Any, ids: torch.Tensor, **settings: Any) -> tuple[torch.Tensor, Graphs]:
    graphs = Graphs()
    return generate(model, ids, cache_implementation="static", compile_config=compiled_by(graphs), **settings), graphs


@pytest.mark.parametrize(("name", "side"), [("llama", "none"), ("gpt2", "left"), ("gemma3-hybrid", "left")])
def test_a_step_is_one_node_a_layer(name: str, side: str) -> None:
    stock, ours = fresh_pair(name)
    ids, mask = tokens(), padding(side)
    given = {} if mask is None else {"attention_mask": mask}
    found, graphs = by_graphs(ours, ids, **given)
    assert torch.equal(found, generate(stock, ids, **given))
    assert graphs.called.count(STEP) == ours.config.num_hidden_layers * len(graphs.found)
    assert not [name for name in graphs.called if "scaled_dot_product" in name]
    assert graphs.asks_of_the_host == []


def test_a_mask_that_is_made_inside_the_graph_stays_a_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    is_read = masks._is_read
    monkeypatch.setattr(masks, "_is_read", lambda structure, device, config: is_read(structure, "cuda", config))
    stock, ours = fresh_pair("llama")
    ids, mask = tokens(), padding("left")
    logits, graphs = [], Graphs()
    for model in (stock, ours):
        cache = tf.StaticCache(config=model.config, max_cache_len=40)
        step = torch.compile(model, backend=graphs, fullgraph=True) if model is ours else model
        with torch.no_grad():
            model(ids, attention_mask=mask, past_key_values=cache)
            last = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            place = last.sum(1, keepdim=True) - 1
            logits.append(step(ids[:, :1], attention_mask=last, position_ids=place, past_key_values=cache).logits)
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)
    assert graphs.called.count(STEP) == ours.config.num_hidden_layers, graphs.called


@pytest.mark.parametrize("choice", [make_choice("window", 32, 4), make_choice(precision="bf16")], ids=lambda c: c.label)
def test_so_is_a_step_under_a_plan(choice: Any) -> None:
    model = planned(choice)
    ids = long_tokens(2)
    mask = torch.ones_like(ids)
    mask[1, :60] = 0
    found, graphs = by_graphs(model, ids, attention_mask=mask)
    assert torch.equal(found, generate(model, ids, attention_mask=mask))
    assert graphs.called.count(STEP) == model.config.num_hidden_layers
    attach.remove_plan(model)
    assert torch.equal(found, generate(model, ids, attention_mask=mask)) == (choice.label == "bf16")


def test_a_cache_with_room_for_more_than_the_plan_speaks_for() -> None:
    """Steps of one graph: under the plan up to its length, and exact behind it."""
    model = planned(make_choice("window", 4))
    plan = attach.plan_of(model)
    assert plan is not None
    attach.load_plan(model, replace(plan, lengths=(204,)), unverified=True)
    found, graphs = by_graphs(model, long_tokens(), max_new_tokens=8)
    assert torch.equal(found, generate(model, long_tokens(), max_new_tokens=8))
    assert graphs.called.count(STEP) == model.config.num_hidden_layers
    attach.load_plan(model, plan, unverified=True)
    assert not torch.equal(found, generate(model, long_tokens(), max_new_tokens=8)), "the plan's length changes nothing"


def test_what_one_launch_cannot_say_stays_the_plans_own_node() -> None:
    model = planned(make_choice(rank=6))
    found, graphs = by_graphs(model, long_tokens())
    assert torch.equal(found, generate(model, long_tokens()))
    assert STEP not in graphs.called
    assert "adaattn_hf.planned.default" in graphs.called
