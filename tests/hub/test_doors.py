"""The kernels' functions refuse and serve what the package's do: one guard stands at every door."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor
from torch.autograd import forward_ad
from transformers import DynamicCache
from transformers.masking_utils import AttentionMaskInterface

import adaattn_hf
from adaattn_hf.patches.call.interface import attention_function

from ..support.choices import make_choice
from ..support.kernels import kernel
from ..support.malformed import Layer
from ..support.models import fresh_pair, logits, tokens
from ..support.plans import give

assert adaattn_hf.NAMES  # the package at one door, the kernel at the other

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
Serve = Callable[..., Any]
KERNEL = "adaattn_kernel_under_test"


@pytest.fixture(params=["package", "kernel"])
def serve(request: pytest.FixtureRequest, load_kernel: Callable[[str], Any]) -> Any:
    return attention_function() if request.param == "package" else load_kernel("adaattn").flash_attn_forward


def drawn(*shape: int) -> list[Tensor]:
    return [torch.randn(*shape, heads, 9, 8) for heads in (4, 2, 2)]


def packed(serve: Serve, tensors: Any, borders: Any, mask: Tensor | None = None) -> Any:
    return serve(Layer(1), *tensors, mask, cu_seq_lens_q=borders, cu_seq_lens_k=borders)[0]


@pytest.mark.parametrize("traced", [False, True])
def test_the_output_can_be_viewed_as_one_row_a_token(serve: Serve, traced: bool) -> None:
    """AFMoE takes a view of it; stock attention's output is contiguous."""

    def viewed(*tensors: Tensor) -> Any:
        return serve(Layer(1), *tensors, None)[0].view(2, 9, -1)

    tensors = drawn(2)
    run = torch.jit.trace(viewed, tuple(tensors), check_trace=False) if traced else viewed
    torch.testing.assert_close(run(*tensors), serve(Layer(1), *tensors, None)[0].flatten(2))


def test_a_bias_that_is_not_dense_is_refused(serve: Serve) -> None:
    with pytest.raises(ValueError, match=r"position_bias: got .*sparse_coo.*, expected a dense floating-point tensor"):
        serve(Layer(1), *drawn(1), None, position_bias=torch.eye(9).to_sparse())


@pytest.mark.parametrize("masked", [False, True])
def test_packed_documents_do_not_see_one_another(serve: Serve, masked: bool) -> None:
    tensors, borders = drawn(1), torch.tensor([0, 4, 9], dtype=torch.int32)
    mask = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril() if masked else None
    out = packed(serve, tensors, borders, mask)
    for a, b in ((0, 4), (4, 9)):
        alone = serve(Layer(1), *(t[:, :, a:b] for t in tensors), None)[0]
        torch.testing.assert_close(out[:, a:b], alone, atol=2e-6, rtol=0)


@pytest.mark.parametrize(("queries", "number"), [(4, False), (4, True), (1, True)])
def test_documents_beside_a_mask_that_tells_no_places_are_refused(serve: Serve, queries: int, number: bool) -> None:
    query, key, value = drawn(1)
    seen = torch.ones(1, 1, queries, 9, dtype=torch.bool).tril(8 - queries).clone()
    seen[..., -1, -1] = True  # made of neither causality nor padding
    mask = torch.where(seen, 0.0, -torch.inf) if number else seen
    borders = torch.tensor([0, queries], dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seq_lens_q: got packed documents beside an attention_mask of"):
        packed(serve, (query[:, :, :queries], key, value), borders, mask)


@pytest.mark.parametrize(
    ("borders", "words"),
    [([0, 4, 12], r"cu_seq_lens_q: got \[0, 4, 12\], expected cumulative lengths"), ([0, 5, 4], "cu_seq_lens_q: got")],
)
def test_documents_that_cannot_be_are_refused(serve: Serve, borders: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        packed(serve, drawn(1), torch.tensor(borders, dtype=torch.int32))
    with pytest.raises(ValueError, match="packed documents lie in one batch row"):
        packed(serve, drawn(2), torch.tensor([0, 4, 9], dtype=torch.int32))


@pytest.mark.parametrize(("keywords", "words"), [
    ({"alibi": torch.ones(4)}, "^alibi: got Tensor from Layer"), ({"invented": 3}, "^invented: got int from Layer"),
    ({"sliding_window": 4}, "sliding_window: got 4 for 9 keys and no attention_mask"),
    ({"scaling": "half"}, "scaling: got 'half'"),
    ({"position_bias": torch.ones(9, 9, dtype=torch.long)}, "position_bias: got"),
    ({"block_table": torch.ones(1)}, "block_table: Layer keeps its keys in a paged cache"),
    ({"cache": object()}, "cache: Layer keeps its keys in a paged cache"),
])  # fmt: skip
def test_what_changes_a_call_and_is_not_served_is_refused(serve: Serve, keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        serve(Layer(1), *drawn(1), None, **keywords)


@pytest.mark.parametrize(
    "mask", [torch.ones(1, 1, 9, 9, dtype=torch.long), torch.ones(9), torch.ones(1, 1, 9, 9, device="meta")]
)
def test_masks_that_say_nothing_are_refused(serve: Serve, mask: Tensor) -> None:
    with pytest.raises(ValueError, match="attention_mask: got"):
        serve(Layer(1), *drawn(1), mask)


def test_a_mask_of_more_keys_than_there_are_is_refused(serve: Serve) -> None:
    """A layer with a window keeps its last keys alone; the first columns of a mask of all are not theirs."""
    for mask in (torch.ones(1, 1, 9, 12, dtype=torch.bool), torch.zeros(1, 1, 9, 12)):
        with pytest.raises(ValueError, match=r"attention_mask: got shape \(1, 1, 9, 12\), expected one that bro"):
            serve(Layer(1), *drawn(1), mask)


def test_a_mask_that_is_written_to_is_read_again(serve: Serve) -> None:
    """It is read once for all layers."""
    query, key, value = (torch.randn(1, 2, 6, 8) for _ in range(3))
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()

    def both() -> tuple[Tensor, Tensor]:
        stock = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask)
        return serve(Layer(1), query, key, value, mask, is_causal=True)[0], stock.transpose(1, 2)

    before = both()
    torch.testing.assert_close(*before)
    mask[..., 0] = False
    mask[..., 0, 0] = True
    after = both()
    torch.testing.assert_close(*after)
    assert not torch.allclose(before[0], after[0])
    with torch.inference_mode():
        torch.testing.assert_close(*both())


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_integers_are_refused(serve: Serve, dtype: torch.dtype) -> None:
    tensors = drawn(1)
    for place, name in enumerate(("query", "key", "value")):
        changed = [t.to(dtype) if place == number else t for number, t in enumerate(tensors)]
        with pytest.raises(ValueError, match=f"{name}: got {dtype}, expected a floating-point dtype"):
            serve(Layer(1), *changed, None)


def test_options_of_losses_pass(serve: Serve) -> None:
    tensors = drawn(1)
    plain = serve(Layer(1), *tensors, None)[0]
    with_options = serve(Layer(1), *tensors, None, ignore_index=-1, num_items_in_batch=3, use_cache=False)[0]
    assert torch.equal(plain, with_options)


def test_selected_keys_are_all_that_is_seen(serve: Serve) -> None:
    tensors = drawn(1)
    indices = torch.arange(9)[None, :, None].clamp(max=3)  # each query its own key, late ones the fourth
    out = serve(Layer(1), *tensors, None, indices=indices)[0]
    right = tensors[2].repeat_interleave(2, 1).transpose(1, 2)[:, indices[0, :, 0]]
    torch.testing.assert_close(out, right, atol=2e-6, rtol=0)


def test_forward_mode_has_a_tangent(serve: Serve) -> None:
    (query, key, value), tangent = drawn(2), torch.randn(2, 4, 9, 8)
    with forward_ad.dual_level():
        out = serve(Layer(1), forward_ad.make_dual(query, tangent), key, value, None)[0]
        found = forward_ad.unpack_dual(out).tangent
    assert found is not None
    doubled = lambda q: serve(Layer(1), q, key.double(), value.double(), None)[0]  # noqa: E731
    _, right = torch.func.jvp(doubled, (query.double(),), (tangent.double(),))
    torch.testing.assert_close(found.double(), right, atol=1e-5, rtol=0)


@pytest.mark.parametrize("masked", [False, True])
def test_batches_of_torch_func(serve: Serve, masked: bool) -> None:
    mask = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril() if masked else None

    def attend(*tensors: Tensor) -> Any:
        return serve(Layer(1), *tensors, mask)[0]

    many = drawn(3, 2)
    apart = torch.stack([attend(*(t[i] for t in many)) for i in range(3)])
    torch.testing.assert_close(torch.func.vmap(attend)(*many), apart, atol=1e-5, rtol=0)


@pytest.mark.parametrize("masked", [False, True])
def test_a_traced_graph_computes_attention_of_its_inputs(serve: Serve, masked: bool) -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Any:
        return serve(Layer(1), query, key, value, mask if masked else None)[0]

    first, mask = drawn(2), torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
    hidden = mask.clone()
    hidden[1, :, :, :3] = False
    traced = torch.jit.trace(attend, (*first, mask), check_trace=False)
    for tensors, shown in ((first, mask), (drawn(2), hidden)):
        torch.testing.assert_close(traced(*tensors, shown), attend(*tensors, shown), atol=1e-5, rtol=0)


def test_kernels_that_settings_name_refuse_transforms(load_kernel: Callable[[str], Any]) -> None:
    layer, serve = Layer(1), load_kernel("adaattn").flash_attn_forward
    layer.config = SimpleNamespace(adaattn={"backend": "native"})  # type: ignore[assignment]
    query, key, value = drawn(2)
    with pytest.raises(RuntimeError, match=r"sees nothing of what its kernels compute"):
        torch.func.grad(lambda q: serve(layer, q, key, value, None)[0].sum())(query)


def heads_last(*shape: int) -> list[Tensor]:
    return [torch.randn(*shape, heads, 8) for heads in (4, 2, 2)]


BORDERS = torch.tensor([0, 4, 9], dtype=torch.int32)


@pytest.mark.parametrize(("name", "shape"), [("varlen", (9,)), ("dense", (2, 9))])
def test_transforms_see_the_functions_of_flash_attention(flash: Any, name: str, shape: tuple[int, ...]) -> None:
    def function(*tensors: Tensor) -> Any:
        if name == "dense":
            return flash.flash_attn_func(*tensors, causal=True, softcap=2.0)
        return flash.flash_attn_varlen_func(*tensors, BORDERS, BORDERS, causal=True, window_size=(3, 0))

    first, second = heads_last(*shape), heads_last(*shape)
    tangent = torch.randn_like(first[0])
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(function(forward_ad.make_dual(first[0], tangent), *first[1:])).tangent
    assert found is not None
    step = 1e-3
    moved = (function(first[0] + sign * step * tangent, *first[1:]) for sign in (1, -1))
    slope = next(moved) - next(moved)
    torch.testing.assert_close(found, slope / (2 * step), atol=2e-3, rtol=0)
    many = [torch.stack(pair) for pair in zip(first, second, strict=True)]
    apart = torch.stack([function(*first), function(*second)])
    torch.testing.assert_close(torch.func.vmap(function)(*many), apart, atol=1e-5, rtol=0)
    traced = torch.jit.trace(function, tuple(first), check_trace=False)
    torch.testing.assert_close(traced(*second), function(*second), atol=1e-5, rtol=0)
    if name == "dense":
        longer = heads_last(2, 12)
        torch.testing.assert_close(traced(*longer), function(*longer), atol=1e-5, rtol=0)


def test_a_traced_graph_reads_the_lengths_that_it_is_called_with(flash: Any) -> None:
    def varlen(q: Tensor, k: Tensor, v: Tensor, borders: Tensor) -> Any:
        return flash.flash_attn_varlen_func(q, k, v, borders, borders, causal=True)

    tensors, other = heads_last(9), torch.tensor([0, 7, 9], dtype=torch.int32)
    traced = torch.jit.trace(varlen, (*tensors, BORDERS), check_trace=False)
    torch.testing.assert_close(traced(*tensors, other), varlen(*tensors, other), atol=1e-5, rtol=0)


def test_caches_are_not_written_under_a_transform(flash: Any) -> None:
    query, cache = torch.randn(1, 1, 4, 8), torch.randn(1, 16, 2, 8)

    def step(q: Tensor) -> Any:
        return flash.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=9)

    step(query)
    with pytest.raises(RuntimeError, match=r"flash_attn_with_kvcache: called under torch\.func"):
        torch.func.vmap(step)(query[None])


def test_a_call_without_memory_is_not_taken_for_one_with_it(flash: Any) -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    tensors = heads_last(2, 11)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = [mode.from_tensor(t) for t in tensors]
    for _ in range(2):
        assert type(flash.flash_attn_func(*tensors, causal=True)) is Tensor
        assert isinstance(flash.flash_attn_func(*fake, causal=True), FakeTensor)


def planned(family: str, **where: Any) -> tuple[Any, Any]:
    """A model with a plan under the package, and the same by the kernel, which nobody hands a model."""
    tf.AttentionInterface.register(KERNEL, kernel("adaattn").flash_attn_forward)
    AttentionMaskInterface.register(KERNEL, AttentionMaskInterface()["sdpa"])
    package, model = fresh_pair(family).ours, fresh_pair(family).ours
    plan = give(package, make_choice("window", window=2), **where)
    model.set_attn_implementation(KERNEL)
    model.config.adaattn = {"plan": plan.to_dict()}
    return package, model


@torch.no_grad()
@pytest.mark.parametrize("full", [True, False], ids=["full cache", "rolling cache"])
def test_a_row_beyond_a_plan_is_exact_where_a_window_hides_how_many_came_before(full: bool) -> None:
    """And one of a sequence that begins in the window is within the plan."""
    ids, (package, by_kernel) = tokens(2, 12), planned("mistral-window", lengths=(8,))
    real = (torch.arange(12) >= torch.tensor([[0], [9]])).long()
    right = package(ids, attention_mask=real, output_attentions=True)
    watched, as_is = adaattn_hf.monitoring(package, sample_rows=False), nullcontext()
    for model, shown, how in (package, True, as_is), (package, False, watched), (by_kernel, False, as_is):
        cache = DynamicCache() if full else DynamicCache(config=model.config)
        model(ids[:, :-1], attention_mask=real[:, :-1], past_key_values=cache)
        mask = (real * torch.arange(12) > 7)[:, None, None, 0 if full else 8 :]
        with how:
            found = model(ids[:, -1:], attention_mask=mask, past_key_values=cache, output_attentions=shown)
        torch.testing.assert_close(found.logits, right.logits[:, -1:], atol=2e-6, rtol=0)
        if shown:
            expected = right.attentions[-1][:, :, -1:, -mask.shape[3] :]
            torch.testing.assert_close(found.attentions[-1], expected, atol=2e-6, rtol=0)


def test_the_first_layer_binds_the_plan_in_a_configuration_to_the_model() -> None:
    package, model = planned("llama")
    exact = logits(fresh_pair("llama").ours)
    for _ in range(2):
        torch.testing.assert_close(logits(model), logits(package), atol=2e-6, rtol=0)
    assert not torch.allclose(logits(model), exact, atol=1e-4)
    torch.testing.assert_close(logits(copy.deepcopy(model)), logits(package), atol=2e-6, rtol=0)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.01)
    with pytest.raises(ValueError, match="weights of the model are not those"):
        logits(model)
    model.config.adaattn = {}
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.div_(1.01)
    torch.testing.assert_close(logits(model), exact, atol=1e-4, rtol=0)
