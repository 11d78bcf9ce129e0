"""Models in graphs: one for many lengths, without a mask where causality says all; values, gradients, export."""

from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from adaattn_hf.backends import select

from ..support.compiled import Graphs
from ..support.models import (
    LENGTH,
    OfTensors,
    answers,
    assert_same,
    cacheless,
    fresh_pair,
    main_output,
    padding,
    pair,
    shallow,
    tokens,
)
from ..support.versions import needs_tracing

pytestmark = needs_tracing

FAMILIES = ("gpt2", "llama", "bert")


def of_area(graph: Any, length: int) -> list[Any]:
    """Nodes with a value of `length` rows and columns."""
    shapes = [(node, getattr(node.meta.get("example_value"), "shape", ())) for node in graph.graph.nodes]
    assert any(shape for _, shape in shapes)
    return [node for node, shape in shapes if tuple(shape[-2:]) == (length, length)]


LENGTHS = (LENGTH, 9, 13, 21)


@pytest.mark.parametrize(("family", "implementation", "side", "cache", "lengths"), [
    *(("llama", "adaattn", "none", cache, LENGTHS) for cache in (True, False)),
    *((family, "adaattn", "left", False, LENGTHS) for family in FAMILIES),
    ("llama", "adaattn", "left", True, LENGTHS[:1]), ("bert", "adaattn", "none", False, LENGTHS[:1]),
    *(("llama", "adaattn_sdpa", side, True, LENGTHS[:1]) for side in ("none", "left")),
])  # fmt: skip
def test_four_lengths_take_two_graphs_at_most_and_a_plain_batch_no_mask(
    family: str, implementation: str, side: str, cache: bool, lengths: tuple[int, ...]
) -> None:
    """Nor does a padded one where the native kernels, which read padding, serve it.

    Where a decoder gets no mask and makes no cache, Transformers looks for packed documents, which takes a mask.
    """
    stock, ours = shallow(family, implementation)
    graphs = Graphs()
    compiled, more = torch.compile(ours, backend=graphs, fullgraph=True), {} if cache else cacheless(family)
    for length in lengths:
        ids, mask = tokens(length=length), padding(side, length=length)
        actual, expected = answers(compiled, stock, input_ids=ids, attention_mask=mask, **more)
        assert_same(expected, actual, mask)
    assert len(graphs.found) <= 2
    reads_padding = implementation == "adaattn" and not select.by_name("native").missing()
    masked = not reads_padding if side == "left" else "use_cache" in more
    # a mask is the only thing as long as the sequence both ways: scores stay inside of the kernels
    assert bool(of_area(graphs.found[0], LENGTH)) == masked


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_steps_over_a_growing_cache_take_two_graphs_at_most(family: str) -> None:
    graphs, found = Graphs(), list[torch.Tensor]()
    for model in shallow(family):
        step = torch.compile(model, backend=graphs, fullgraph=True) if found else model
        with torch.no_grad():
            cache = model(input_ids=tokens()).past_key_values
            steps = [step(input_ids=tokens()[:, at : at + 1], past_key_values=cache).logits for at in range(4)]
        found.append(torch.cat(steps, 1))
    assert_same(*found)
    assert (len(graphs.found) <= 2, graphs.asks_of_the_host) == (True, [])


@pytest.mark.parametrize("family", FAMILIES)
def test_training_is_one_graph_forward_and_backward(family: str) -> None:
    stock, ours = fresh_pair(family, num_hidden_layers=1)
    graphs: list[Any] = []

    def counted(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    compiled = torch.compile(ours, backend=aot_autograd(fw_compiler=counted), fullgraph=True)
    mask = padding("left")
    for model in (stock, compiled):
        output = main_output(model(input_ids=tokens(), attention_mask=mask, **cacheless(family)))[mask.bool()]
        direction = torch.randn(output.shape[-1], generator=torch.Generator().manual_seed(2))
        (output * direction).sum(1).square().mean().backward()
    assert len(graphs) == 2, "one forward, one backward"
    for (name, before), after in zip(stock.named_parameters(), ours.parameters(), strict=True):
        if before.grad is not None:
            assert after.grad is not None, name
            assert_same(before.grad, after.grad, rtol=1e-4)


@pytest.mark.parametrize("side", ["none", "left"])
def test_layers_of_two_kinds_are_one_graph(side: str) -> None:
    stock, ours = pair("gemma3-hybrid")
    graphs, mask = Graphs(), padding(side)
    same_compiled(stock, torch.compile(ours, backend=graphs, fullgraph=True), mask)
    assert len(graphs.found) == 1


def same_compiled(stock: Any, compiled: Any, mask: Any) -> None:
    assert_same(*answers(stock, compiled, input_ids=tokens(), attention_mask=mask, use_cache=False), mask)


@pytest.mark.slow
def test_inductor_runs_what_it_compiles() -> None:
    stock, ours = shallow("gpt2")
    same_compiled(stock, torch.compile(ours, fullgraph=True), padding("left"))


def test_looking_for_packages_does_not_break_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA the backends in front are asked whether their packages are there; so they are here."""
    _, ours = shallow("llama")
    monkeypatch.setattr(select, "order", lambda kind: ("fa3", "fa2", "triton", "sdpa", "eager"))
    same_compiled(ours, torch.compile(ours, backend="eager", fullgraph=True), None)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_export_gives_the_same_numbers(family: str) -> None:
    stock, ours = shallow(family)
    mask = padding("left")
    with torch.no_grad():
        bound_layer = torch.export.export(OfTensors(family, ours), (tokens(), mask), strict=False)
        assert select.by_name("native").missing() or "native_attend" in str(bound_layer.graph)
        for given in (mask, padding("right")):
            ids = tokens(seed=4)
            expected = main_output(stock(input_ids=ids, attention_mask=given, **cacheless(family)))
            assert_same(expected, bound_layer.module()(ids, given), given)
