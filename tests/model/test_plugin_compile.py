"""`torch.compile(fullgraph=True)`: one graph, right values, gradients through it, no graph for every length."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from adaattn_hf.backends import select

from ..support.models import ENCODERS, assert_same, fresh_pair, main_output, padding, pair, tokens
from ..support.versions import needs_tracing

pytestmark = needs_tracing

NAMES = ("gpt2", "llama", "bert", "gemma3-hybrid")


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", NAMES)
def test_whole_model_is_one_graph(name: str, side: str) -> None:
    stock, ours = pair(name)
    counter = CompileCounter()
    compiled = torch.compile(ours, backend=counter, fullgraph=True)
    keywords = {} if name in ENCODERS else dict(use_cache=False)
    ids, mask = tokens(), padding(side)
    with torch.no_grad():
        expected = main_output(stock(input_ids=ids, attention_mask=mask, **keywords))
        actual = main_output(compiled(input_ids=ids, attention_mask=mask, **keywords))
    assert counter.frame_count == 1
    assert_same(expected, actual, mask)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_no_more_graphs_than_stock_over_three_lengths(name: str) -> None:
    models = fresh_pair(name, "adaattn")
    models.stock.set_attn_implementation("sdpa")
    keywords = {} if name in ENCODERS else dict(use_cache=False)
    graphs = []
    for model in models:
        torch._dynamo.reset()
        counter = CompileCounter()
        compiled = torch.compile(model, backend=counter, fullgraph=True)
        with torch.no_grad():
            for length in (11, 9, 13):
                mask = padding("left", length=length)
                compiled(input_ids=tokens(length=length), attention_mask=mask, **keywords)
        graphs.append(counter.frame_count)
    stock, ours = graphs
    assert 1 <= ours <= stock


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_gradients_through_a_compiled_model_equal_eager(name: str) -> None:
    stock, ours = fresh_pair(name)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    keywords = {} if name in ENCODERS else dict(use_cache=False)
    mask = padding("left")
    assert mask is not None
    for model in (stock, compiled):
        output = main_output(model(input_ids=tokens(), attention_mask=mask, **keywords))[mask.bool()]
        direction = torch.randn(output.shape[-1], generator=torch.Generator().manual_seed(2))
        (output * direction).sum(1).square().mean().backward()
    for (name_, expected), actual in zip(stock.named_parameters(), ours.parameters(), strict=True):
        if expected.grad is not None:
            assert actual.grad is not None, name_
            assert_same(expected.grad, actual.grad, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_inductor_runs_what_it_compiles() -> None:
    stock, ours = pair("gpt2")
    compiled = torch.compile(ours, fullgraph=True)
    mask = padding("left")
    with torch.no_grad():
        expected = stock(input_ids=tokens(), attention_mask=mask, use_cache=False).logits
        actual = compiled(input_ids=tokens(), attention_mask=mask, use_cache=False).logits
    assert_same(expected, actual, mask)


@pytest.mark.parametrize("first", ["fa3", "fa2", "triton"])
def test_looking_for_packages_does_not_break_the_graph(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA the backends in front are asked whether their packages are there; so they are here."""
    _, ours = pair("llama")
    monkeypatch.setattr(select, "order", lambda spec: (first, "sdpa", "eager"))
    with torch.no_grad():
        compiled = torch.compile(ours, backend="eager", fullgraph=True)
        assert_same(
            ours(input_ids=tokens(), use_cache=False).logits,
            compiled(input_ids=tokens(), use_cache=False).logits,
        )
