"""What records or transforms a model's operations sees attention, too: tracers, forward mode, torch.func."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import AttentionInterface

from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends.select import BackendRefusal
from adaattn_hf.patches.mask.structured_mask import StructuredMask

from ..support.malformed import Layer
from ..support.models import cacheless, fresh_pair, padding, tokens

# torch's own tracers warn of themselves and of one another
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")


def attention(query: Tensor, key: Tensor, value: Tensor, name: str = "adaattn") -> Any:
    serve: Any = AttentionInterface._global_mapping[name]
    return serve(Layer(1), query, key, value, None)[0]


def drawn(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(*shape, 4, 7, 8), torch.randn(*shape, 2, 7, 8), torch.randn(*shape, 2, 7, 8)


@pytest.mark.parametrize("made", ["with ones", "with padding", "without a mask"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral-window", "bert"])
def test_a_traced_model_computes_attention_of_its_inputs(family: str, made: str) -> None:
    """A graph may keep neither the tokens of its making nor that their mask hid nothing."""
    stock, ours = fresh_pair(family)
    ids, ones, left = tokens(), torch.ones_like(tokens()), padding("left")

    def run(ids: Tensor, mask: Tensor | None = None) -> Any:
        return ours(input_ids=ids, attention_mask=mask, **cacheless(family))[0]

    ours.requires_grad_(False)  # the tracer takes no leaf that needs a gradient for a constant
    given = {"with ones": (ids, ones), "with padding": (ids, left), "without a mask": (ids,)}[made]
    masks = (ones, left, left.roll(1, 0)) if len(given) == 2 else (ones,)
    others = ids.flip(1)
    with torch.no_grad():
        traced = torch.jit.trace(run, given, check_trace=False)
        for mask in masks:
            expected = stock(input_ids=others, attention_mask=mask, **cacheless(family))[0]
            found, real = traced(others, *((mask,) if len(given) == 2 else ())), mask.bool()
            torch.testing.assert_close(found[real], expected[real], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["adaattn", "adaattn_sdpa", "adaattn_eager"])
@pytest.mark.parametrize("said", ["sinks", "softcap", "documents"])
def test_a_traced_call_computes_attention_of_its_inputs(name: str, said: str) -> None:
    """A program of parts that are written into one output is no graph: its numbers would stay those of its making."""
    borders, batch = torch.tensor([0, 3, 7], dtype=torch.int32), 1 if said == "documents" else 2
    keywords: dict[str, Any] = {"softcap": 2.0} if said == "softcap" else {"s_aux": torch.randn(4)}
    if said == "documents":
        keywords = {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders}
    serve: Any = AttentionInterface._global_mapping[name]

    def run(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return serve(Layer(1), query, key, value, None, **keywords)[0]

    with torch.no_grad():
        traced = torch.jit.trace(run, drawn(batch), check_trace=False)
        second = drawn(batch)
        torch.testing.assert_close(traced(*second), run(*second), atol=1e-5, rtol=1e-5)


def test_make_fx_records_every_operation() -> None:
    first, second = drawn(2), drawn(2)
    graph = make_fx(lambda q, k, v: attention(q, k, v))(*first)
    torch.testing.assert_close(graph(*second), attention(*second), atol=1e-5, rtol=0)


def test_forward_mode_has_a_tangent() -> None:
    (query, key, value), tangent = drawn(2), torch.randn(2, 4, 7, 8)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(attention(forward_ad.make_dual(query, tangent), key, value)).tangent
    assert found is not None
    step = 1e-3
    slope = (attention(query + step * tangent, key, value) - attention(query - step * tangent, key, value)) / (2 * step)
    torch.testing.assert_close(found, slope, atol=2e-3, rtol=0)


def test_functional_gradients_and_batches() -> None:
    query, key, value = drawn(2)
    leaf = query.clone().requires_grad_()
    (right,) = torch.autograd.grad(attention(leaf, key, value).sum(), leaf)
    found = torch.func.grad(lambda q: attention(q, key, value).sum())(query)
    torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-5)
    many = drawn(3, 2)
    apart = torch.stack([attention(*(t[i] for t in many)) for i in range(3)])
    torch.testing.assert_close(torch.func.vmap(attention)(*many), apart, atol=1e-5, rtol=0)


def test_native_kernels_asked_for_by_name_refuse() -> None:
    query, key, value = drawn(2)
    attention(query, key, value, "adaattn_native")
    with pytest.raises(BackendRefusal, match=r"torch\.func .* sees nothing of what its kernels compute"):
        torch.func.grad(lambda q: attention(q, key, value, "adaattn_native").sum())(query)


def test_symbolic_lengths_are_refused_by_name() -> None:
    with pytest.raises(BackendRefusal, match="make_fx: got lengths that are symbols"):
        make_fx(lambda q, k, v: attention(q, k, v), tracing_mode="symbolic")(*drawn(2))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("name", ["adaattn", "adaattn_sdpa"])
def test_second_derivatives_of_fused_backward_passes_are_refused(family: str, name: str, padded: bool) -> None:
    """Not even where only parameters are asked for, to which no path of the graph leads but those through attention."""
    _, ours = fresh_pair(family)
    ours.set_attn_implementation(name)
    ids = tokens()
    out = ours(input_ids=ids, attention_mask=padding("left") if padded else torch.ones_like(ids))[0]
    weights = [p for p in ours.parameters() if p.requires_grad]
    first = torch.autograd.grad(out.square().sum(), weights, create_graph=True, allow_unused=True)
    total = sum(g.square().sum() for g in first if g is not None)
    assert isinstance(total, Tensor)
    with pytest.raises(RuntimeError, match=r"second derivatives of attention|is not implemented"):
        torch.autograd.grad(total, weights, allow_unused=True)


def test_torch_operations_have_second_derivatives() -> None:
    query, key, value = (t.requires_grad_() for t in drawn(2))
    total = attention(query, key, value, "adaattn_eager").square().sum()
    (first,) = torch.autograd.grad(total, query, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), query)
    assert second.isfinite().all()
    assert second.any()


def test_a_structure_of_documents_is_traced() -> None:
    """What is read of a tensor's extents is a tensor while torch.jit traces."""
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    rules = MaskStructure(1, 7, 7, causal=True, q_segments=documents, k_segments=documents)
    mask = StructuredMask(rules, torch.device("cpu"))
    serve: Any = AttentionInterface._global_mapping["adaattn"]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return serve(Layer(1), query, key, value, mask, softcap=2.0)[0]

    with torch.no_grad():
        traced = torch.jit.trace(attend, drawn(1), check_trace=False)
        other = drawn(1)
        torch.testing.assert_close(traced(*other), attend(*other))
