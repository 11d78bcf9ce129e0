"""An ordinary call takes the launch of its kind, whatever came before; all that differs is decided by itself."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import causal_mask_function
from transformers.utils import output_capturing

from adaattn_hf.attention import reference
from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.listeners import Listener, listeners, listening, tapping
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends import select
from adaattn_hf.patches.cache.caches import AdaAttnCache
from adaattn_hf.patches.cache.layers import CachedLayer
from adaattn_hf.patches.call import extended
from adaattn_hf.patches.call.interface import attention_function
from adaattn_hf.patches.mask import structured_mask
from adaattn_hf.patches.mask.masks import adaattn_mask
from adaattn_hf.patches.mask.structured_mask import StructuredMask

from ..support.recorder import Recorder

N = 12
attend = attention_function()


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    select.plain_kernels.clear()
    structured_mask._structures.clear()
    yield
    select.plain_kernels.clear()
    structured_mask._structures.clear()


@pytest.fixture
def long(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    way, calls = extended.attend_extended, [0]

    def counted(*arguments: Any) -> Any:
        calls[0] += 1
        return way(*arguments)

    monkeypatch.setattr(extended, "attend_extended", counted)
    return calls


def layer(config: Any = None) -> nn.Module:
    module = nn.Module()
    vars(module)["config"] = LlamaConfig() if config is None else config
    return module


def draw(heads: int = 4, dtype: torch.dtype = torch.float32, dim: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    made = (torch.randn(2, N, count, dim) for count in (heads, 2, 2))
    q, k, v = (t.to(dtype).transpose(1, 2) for t in made)
    return q, k, v


def mask_for(module: nn.Module) -> StructuredMask:
    mask = adaattn_mask(2, N, N, mask_function=causal_mask_function, config=module.config)
    assert isinstance(mask, StructuredMask)
    return mask


def truth(q: Tensor, k: Tensor, v: Tensor, **rules: Any) -> Tensor:
    structure = MaskStructure(2, N, N, causal=True, **rules)
    out: Tensor = reference.attention(AttentionCall(q, k, v, structure, q.shape[3] ** -0.5)).out
    return out


def kinds() -> int:
    return len(select.plain_kernels)


def test_layers_and_passes_of_a_kind_share_a_launch(long: list[int]) -> None:
    module = layer()
    for _ in range(2):
        mask = mask_for(module)
        for one in (module, layer(module.config)):
            q, k, v = draw()
            with torch.no_grad():
                out, weights = attend(one, q, k, v, mask, position_ids=torch.arange(N)[None], use_cache=False)
            assert weights is None
            torch.testing.assert_close(out.double(), truth(q, k, v), atol=1e-5, rtol=0)
    assert (long, kinds()) == ([0], 1)


@pytest.mark.parametrize("apart", [False, True])
def test_the_first_layer_alone_reads_the_documents_of_a_pass(apart: bool, long: list[int]) -> None:
    """Also where queries and keys are told by tensors of their own; other lengths are read anew."""
    module = layer()
    mask = adaattn_mask(1, N, N, mask_function=causal_mask_function, config=module.config)
    for first in (5, 5, 8):
        ends = torch.tensor([0, first, N], dtype=torch.int32)
        said = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends.clone() if apart else None, "max_length_q": N}
        documents = (torch.arange(N) >= first).long()[None]
        for _ in range(3):
            q, k, v = (t[:1] for t in draw())
            with torch.no_grad():
                out, _ = attend(module, q, k, v, mask, **said)
            structure = MaskStructure(1, N, N, causal=True, q_segments=documents, k_segments=documents)
            expected = reference.attention(AttentionCall(q, k, v, structure, 0.25)).out
            torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=0)
    assert long == [3]


def test_settings_are_heard() -> None:
    module = layer()
    mask = mask_for(module)
    with torch.no_grad():
        attend(module, *draw(), mask)
        module.config.adaattn = {"backend": "eager"}
        attend(module, *draw(), mask)
        assert kinds() == 2
        module.config.adaattn["backend"] = "no such backend"
        with pytest.raises(ValueError, match="no such backend"):
            attend(module, *draw(), mask)


def test_steps_of_a_growing_cache_are_few_kinds(long: list[int]) -> None:
    """Kinds hold no lengths but by classes of size: powers of two, by which backends are chosen."""
    model = small_llama()
    with torch.no_grad():
        model.generate(torch.randint(61, (1, 5)), max_new_tokens=123, do_sample=False, pad_token_id=0)
    assert long == [0]
    assert kinds() <= 1 + 2 * 5  # the prompt; of keys in 8 to 128 two roundings


@pytest.mark.parametrize("backend", [None, "sdpa", "native", "eager"])
def test_launches_keep_no_tensor_and_no_structure(backend: str | None) -> None:
    by, module = attention_function(backend), layer()
    mask, tensors = mask_for(module), draw()
    kept = [weakref.ref(one) for one in (*tensors, mask.structure)]
    with torch.no_grad():
        by(module, *tensors, mask)
    gc.disable()
    try:
        del mask, tensors
        structured_mask._structures.clear()
        assert [one() for one in kept] == [None] * 4
        assert select.plain_kernels
    finally:
        gc.enable()


def test_whoever_listens_is_told(long: list[int]) -> None:
    module = layer()
    mask, (q, k, v), seen = mask_for(module), draw(), []

    def tap(who: nn.Module, call: AttentionCall) -> Tensor:
        seen.append(who)
        return torch.zeros(2, N, 4, 16)

    recorder = Recorder()
    with torch.no_grad():
        attend(module, q, k, v, mask)
        with tapping(tap):
            attend(module, q, k, v, mask)
        with listening(recorder):
            attend(module, q, k, v, mask)
        token = output_capturing._active_collector.set({"attentions": []})
        try:
            _, weights = attend(module, q, k, v, mask)
        finally:
            output_capturing._active_collector.reset(token)
        _, asked = attend(module, q, k, v, mask, output_attentions=True)
        assert long == [4]
        attend(module, q, k, v, mask)
    assert seen == [module]
    assert len(recorder.calls) == 1
    assert weights is not None
    assert asked is not None
    assert long == [4], "nobody listens any more"


def test_listeners_may_leave_in_any_order() -> None:
    def tap(_: nn.Module, call: AttentionCall) -> Tensor:
        return call.query

    first, second = tapping(tap), listening(Recorder())
    answers, recorder = first.__enter__(), second.__enter__()
    assert listeners() == (answers, recorder)
    first.__exit__(None, None, None)
    assert listeners() == (recorder,)
    second.__exit__(None, None, None)
    assert listeners() == ()


def test_listeners_of_inner_blocks_answer_first_and_all_see_the_answer() -> None:
    module, told = layer(), []

    def notes(name: str, answers: bool) -> Listener:
        return Listener(
            before=lambda _, call: told.append(f"{name} before, for {call.backend}"),
            answer=lambda _, call: call.query.new_full((2, N, 4, 16), len(name)) if answers else None,
            after=lambda _, call, out: told.append(f"{name} after {out.unique().tolist()}"),
        )

    with (
        torch.no_grad(),
        listening(notes("outer", True)),
        listening(notes("in", True)),
        listening(notes("last", False)),
    ):
        out, _ = attend(module, *draw(), mask_for(module))
    before, after = ("outer", "in", "last"), ("last", "in", "outer")
    assert told == [f"{name} before, for None" for name in before] + [f"{name} after [2.0]" for name in after]
    assert out.unique().tolist() == [2.0]


def test_autocast_still_decides_the_dtype(long: list[int]) -> None:
    module = layer()
    mask = mask_for(module)
    with torch.no_grad():
        attend(module, *draw(), mask)
        with torch.autocast("cpu", torch.bfloat16):
            out, _ = attend(module, *draw(), mask)
        assert out.dtype == torch.bfloat16
        upcast = layer(module.config)
        vars(upcast)["reorder_and_upcast_attn"] = True
        attend(upcast, *draw(), mask)
    assert long == [2]


def test_calls_without_a_mask(long: list[int]) -> None:
    module = layer()
    vars(module)["is_causal"] = True
    q, k, v = draw()
    with torch.no_grad():
        first, _ = attend(module, q, k, v, None)
        again, _ = attend(module, q, k, v, None)
        both_ways, _ = attend(module, q, k, v, None, is_causal=False)
    assert torch.equal(first, again)
    assert long == [2], "the first calls of their shape make its structure"
    torch.testing.assert_close(first.double(), truth(q, k, v), atol=1e-5, rtol=0)
    assert not torch.allclose(first, both_ways)


@pytest.mark.parametrize("what", ["key dtype", pytest.param("freed", marks=pytest.mark.native), "negated", "zeros"])
def test_memory_that_cannot_be_read_as_it_is(what: str) -> None:
    module = layer()
    mask, (q, k, v) = mask_for(module), draw()
    with torch.no_grad():
        attend(module, *draw(), mask)
        if what == "key dtype":
            out, _ = attend(module, q, k.to(torch.bfloat16), v, mask)
            torch.testing.assert_close(out.double(), truth(q, k.to(torch.bfloat16).float(), v), atol=1e-5, rtol=0)
        elif what == "freed":
            whole = torch.randn(2, 2, N + 1, 16)
            view = whole[:, :, 1:]
            whole.untyped_storage().resize_(0)
            with pytest.raises(ValueError, match="its storage was freed"):
                attend(module, q, view, v, mask)
        else:
            other = torch._neg_view(k) if what == "negated" else torch._efficientzerotensor(k.shape)
            out, _ = attend(module, q, other, v, mask)
            expected = truth(q, -k if what == "negated" else torch.zeros_like(k), v)
            torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=0)


def small_llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=128, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="adaattn",
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config).eval()
    return model


def steps_over(model: Any, caches: dict[str, Any], tokens: Tensor) -> dict[str, Tensor]:
    """Logits of single tokens behind a prompt of 20, the caches taking turns at each length."""
    found: dict[str, list[Tensor]] = {name: [] for name in caches}
    with torch.no_grad():
        for cache in caches.values():
            model(tokens[:, :20], past_key_values=cache)
        for at in range(20, tokens.shape[1]):
            for name, cache in caches.items():
                found[name].append(model(tokens[:, at : at + 1], past_key_values=cache).logits)
    return {name: torch.cat(parts, 1) for name, parts in found.items()}


def test_steps_over_codes_are_ordinary_calls(long: list[int]) -> None:
    """They give what the long way gives, to the last bit, and caches of other formats between do not confuse them."""
    model, tokens = small_llama(), torch.randint(61, (2, 32))

    def caches() -> dict[str, Any]:
        return {name: AdaAttnCache(model, name) for name in ("int8", "k8v4", "model")}

    alone = steps_over(model, {"int8": AdaAttnCache(model, "int8")}, tokens)["int8"]
    assert long == [0]
    together = steps_over(model, caches(), tokens)
    with listening(Recorder()):
        slowly = steps_over(model, caches(), tokens)
    assert torch.equal(together["int8"], alone)
    for name, logits in together.items():
        assert torch.equal(logits, slowly[name])


def test_codes_and_plain_integers_are_not_taken_for_one_another() -> None:
    module, cached, keys = layer(), CachedLayer("int8"), torch.randn(1, 2, 20, 32)
    cached.update(keys, keys)
    key, value = cached.keys, cached.values
    query = torch.randn(1, 4, 1, 32)
    with torch.no_grad():
        first, _ = attend(module, query, key, value, None)
        again, _ = attend(module, query, key, value, None)
        assert torch.equal(first, again)
        with pytest.raises(ValueError, match="dtype"):
            attend(module, query, key.codes, value.codes, None)


@pytest.mark.native
@pytest.mark.parametrize("what", ["scales", "mean", "first"])
def test_a_record_that_does_not_belong_to_its_codes_is_refused(what: str) -> None:
    """The memory behind it would be read all the same."""
    module, cached, keys = layer(), CachedLayer("int8"), torch.randn(1, 2, 20, 32)
    cached.update(keys, keys)
    query = torch.randn(1, 4, 1, 32)
    with torch.no_grad():
        attend(module, query, cached.keys, cached.values, None)
        key, value = cached.keys, cached.values
        record = key.record
        assert record is not None
        if what == "scales":
            record.value_scale = record.value_scale[:, :, :19]
        elif what == "mean":
            record.key_mean = torch.zeros(1, 2, 64)[:, :, ::2]
        else:
            record.first_key = torch.zeros(1, 1, 32)
        with pytest.raises(ValueError, match=r"value_scale|key_mean|first_key"):
            attend(module, query, key, value, None)
