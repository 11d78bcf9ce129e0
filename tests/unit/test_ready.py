"""What one layer of a pass found out serves the next ones, and no call that differs."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig
from transformers.masking_utils import causal_mask_function
from transformers.utils import output_capturing

from adaattn_hf.attention import reference
from adaattn_hf.attention.request import AttentionRequest
from adaattn_hf.attention.structure import CallStructure
from adaattn_hf.attention.tap import NOBODY, Recorder, listening, recording, tapping
from adaattn_hf.patches import fast_path, interface
from adaattn_hf.patches.cache.stored import AdaAttnCache
from adaattn_hf.patches.cache.tokens import StoredTokens
from adaattn_hf.patches.interface import attention_function
from adaattn_hf.patches.masks import adaattn_mask
from adaattn_hf.patches.structured_mask import StructuredMask

N = 12
attend = attention_function()


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


@pytest.fixture
def warm() -> tuple[nn.Module, StructuredMask, list[int]]:
    """A layer, the mask of its pass, and how often what its first call found out was used."""
    module, used = layer(), [0]
    mask = mask_for(module)
    with torch.no_grad():
        attend(module, *draw(), mask)
    assert mask.structure.ready is not None
    way = mask.structure.ready.attend

    def counted(*arguments: Any) -> Tensor:
        used[0] += 1
        out: Tensor = way(*arguments)
        return out

    mask.structure.ready = mask.structure.ready._replace(attend=counted)
    return module, mask, used


def truth(q: Tensor, k: Tensor, v: Tensor, **rules: Any) -> Tensor:
    structure = CallStructure(2, N, N, causal=True, **rules)
    out: Tensor = reference.attention(AttentionRequest(q, k, v, structure, q.shape[3] ** -0.5)).out
    return out


def test_a_layer_like_the_first_takes_its_way(warm: Any) -> None:
    module, mask, used = warm
    q, k, v = draw()
    other = layer(module.config)
    with torch.no_grad():
        out, weights = attend(other, q, k, v, mask, position_ids=torch.arange(N)[None], use_cache=False)
    assert used == [1]
    assert weights is None
    torch.testing.assert_close(out.double(), truth(q, k, v), atol=1e-5, rtol=0)


@pytest.mark.parametrize("what", ["heads", "size", "dtype", "values", "gradient"])
def test_other_tensors_are_decided_anew(warm: Any, what: str) -> None:
    module, mask, used = warm
    q, k, v = draw(heads=2) if what == "heads" else draw(dim=32 if what == "size" else 16)
    if what == "dtype":
        q, k, v = q.double(), k.double(), v.double()
    if what == "values":
        v = torch.cat([v, v], dim=3)
    if what == "gradient":
        q.requires_grad_()
    with nullcontext() if what == "gradient" else torch.no_grad():
        out, _ = attend(module, q, k, v, mask)
    assert used == [0]
    assert out.requires_grad == (what == "gradient")
    torch.testing.assert_close(out.double(), truth(q, k, v), atol=1e-5, rtol=0)


def test_other_settings_and_families_are_decided_anew(warm: Any) -> None:
    module, mask, used = warm
    adapted = LlamaConfig(adaattn={"backend": "eager"})
    with torch.no_grad():
        attend(layer(adapted), *draw(), mask)
        attention_function("eager")(module, *draw(), mask)
    assert used == [0]
    borderless = layer(OPTConfig())
    mask = mask_for(borderless)
    with torch.no_grad():
        attend(borderless, *draw(), mask)
    assert mask.structure.ready is None, "positions mean something in this family"


def test_keywords_that_change_the_call(warm: Any) -> None:
    module, mask, _used = warm
    q, k, v = (t[:1] for t in draw())
    mask = StructuredMask(CallStructure(1, N, N, causal=True), torch.device("cpu"))
    with torch.no_grad():
        attend(module, q, k, v, mask)
        assert mask.structure.ready is not None
        borders = torch.tensor([0, 5, N], dtype=torch.int32)
        out, _ = attend(module, q, k, v, mask, cu_seq_lens_q=borders, cu_seq_lens_k=borders)
        capped, _ = attend(module, q, k, v, mask, softcap=0.5)
        whole, _ = attend(module, q, k, v, mask)
    documents = (torch.arange(N) >= 5).long()[None]
    rules: dict[str, Any] = {"q_segments": documents, "k_segments": documents}
    structure = CallStructure(1, N, N, causal=True, **rules)
    expected = reference.attention(AttentionRequest(q, k, v, structure, 0.25)).out
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=0)
    assert not torch.allclose(out, whole)
    assert not torch.allclose(capped, whole)


def test_a_backend_without_a_fast_call_is_chosen_once_in_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    by_eager, module = attention_function("eager"), layer()
    mask = mask_for(module)
    by_eager(module, *draw(), mask)
    assert mask.structure.ready is not None
    assert not mask.structure.ready.bare

    def never(*arguments: Any) -> Any:
        raise AssertionError("the second layer took the long way")

    q, k, v = draw()
    with monkeypatch.context() as patch:
        patch.setattr(interface, "_attend_anew", never)
        patch.setattr(fast_path, "choose", never)
        out, _ = by_eager(module, q, k, v, mask, scaling=0.5)
        with pytest.raises(AssertionError, match="long way"):
            by_eager(module, *draw(dtype=torch.float64), mask)
    structure = CallStructure(2, N, N, causal=True)
    expected = reference.attention(AttentionRequest(q, k, v, structure, 0.5)).out
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=0)


def test_what_a_pass_found_out_goes_with_its_mask() -> None:
    """Tables of a device's memory hang on it."""
    by_eager, module = attention_function("eager"), layer()
    mask = mask_for(module)
    by_eager(module, *draw(), mask)
    structure = weakref.ref(mask.structure)
    gc.disable()
    try:
        del mask
        fast_path._structures.clear()
        assert structure() is None
    finally:
        gc.enable()


def test_whoever_listens_is_told(warm: Any) -> None:
    module, mask, used = warm
    q, k, v = draw()
    seen: list[Any] = []

    def tap(who: nn.Module, request: AttentionRequest) -> Tensor:
        seen.append(who)
        return torch.zeros(2, N, 4, 16)

    recorder = Recorder()
    with torch.no_grad():
        with tapping(tap):
            attend(module, q, k, v, mask)
        with recording(recorder):
            attend(module, q, k, v, mask)
        token = output_capturing._active_collector.set({"attentions": []})
        try:
            _, weights = attend(module, q, k, v, mask)
        finally:
            output_capturing._active_collector.reset(token)
        _, asked = attend(module, q, k, v, mask, output_attentions=True)
    assert seen == [module]
    assert len(recorder.calls) == 1
    assert weights is not None
    assert asked is not None
    assert used == [0]
    with torch.no_grad():
        attend(module, q, k, v, mask)
    assert used == [1], "nobody listens any more"


def test_listeners_may_leave_in_any_order() -> None:
    def tap(_: nn.Module, request: AttentionRequest) -> Tensor:
        return request.query

    first, second = tapping(tap), recording(Recorder())
    first.__enter__()
    recorder = second.__enter__()
    assert listening() == (tap, None, recorder)
    first.__exit__(None, None, None)
    assert listening() == (None, None, recorder)
    second.__exit__(None, None, None)
    assert listening() == NOBODY


def test_a_layer_may_lie_otherwise_in_memory(warm: Any) -> None:
    module, mask, used = warm
    q, _, v = draw()
    wide = torch.randn(2, 2, N + 5, 16)[:, :, :N]
    with torch.no_grad():
        out, _ = attend(module, q.contiguous(), wide, v, mask)
    assert used == [1]
    torch.testing.assert_close(out.double(), truth(q, wide, v), atol=1e-5, rtol=0)


def test_autocast_still_decides_the_dtype(warm: Any) -> None:
    module, mask, used = warm
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out, _ = attend(module, *draw(), mask)
    assert out.dtype == torch.bfloat16
    assert used == [0]
    upcast = layer(module.config)
    vars(upcast)["reorder_and_upcast_attn"] = True
    with torch.no_grad():
        attend(upcast, *draw(), mask)
    assert used == [0]


def test_calls_without_a_mask_are_kept_too(warm: Any) -> None:
    module, _, _ = warm
    module.is_causal = True
    q, k, v = draw()
    with torch.no_grad():
        first, _ = attend(module, q, k, v, None)
        structure = fast_path.recall((2, N, N, True))
        assert structure is not None
        assert structure.ready is not None
        again, _ = attend(module, q, k, v, None)
        both_ways, _ = attend(module, q, k, v, None, is_causal=False)
    assert torch.equal(first, again)
    torch.testing.assert_close(first.double(), truth(q, k, v), atol=1e-5, rtol=0)
    assert not torch.allclose(first, both_ways)


def test_settings_that_come_later_are_heard() -> None:
    module = layer()
    mask = mask_for(module)
    with torch.no_grad():
        attend(module, *draw(), mask)
        assert mask.structure.ready is not None
        module.config.adaattn = {"backend": "no such backend"}
        with pytest.raises(ValueError, match="no such backend"):
            attend(module, *draw(), mask)


@pytest.mark.parametrize("what", ["key dtype", "freed", "negated", "zeros"])
def test_memory_that_cannot_be_read_as_it_is(warm: Any, what: str) -> None:
    module, mask, _used = warm
    q, k, v = draw()
    with torch.no_grad():
        if what == "key dtype":
            out, _ = attend(module, q, k.to(torch.bfloat16), v, mask)
            torch.testing.assert_close(
                out.double(), truth(q, k.to(torch.bfloat16).float(), v), atol=1e-5, rtol=0
            )
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


# ---------------- codes of a cache
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


def test_later_layers_of_a_step_over_codes_take_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives what the long way gives, to the last bit, and caches of other formats between do not confuse it."""
    model, tokens = small_llama(), torch.randint(61, (2, 32))
    long, calls = interface._attend_anew, [0]

    def counted(*arguments: Any) -> Any:
        calls[0] += 1
        return long(*arguments)

    monkeypatch.setattr(interface, "_attend_anew", counted)

    def caches() -> dict[str, Any]:
        return {name: AdaAttnCache(model, name) for name in ("int8", "k8v4", "model")}

    fast_path._structures.clear()
    alone = steps_over(model, {"int8": AdaAttnCache(model, "int8")}, tokens)["int8"]
    # of each length the first layer
    assert calls[0] == 13
    together = steps_over(model, caches(), tokens)
    with recording(Recorder()):
        slowly = steps_over(model, caches(), tokens)
    assert torch.equal(together["int8"], alone)
    for name, logits in together.items():
        assert torch.equal(logits, slowly[name])


def test_codes_and_plain_integers_are_not_taken_for_one_another() -> None:
    module, tokens = layer(), StoredTokens(*(torch.zeros(1, 2, 0, 32),) * 2, "int8")
    keys = torch.randn(1, 2, 20, 32)
    tokens.append(keys, keys)
    key, value = tokens.carriers()
    query = torch.randn(1, 4, 1, 32)
    with torch.no_grad():
        first, _ = attend(module, query, key, value, None)
        ready = fast_path.recall((1, 1, 20, False))
        assert ready is not None
        assert ready.ready is not None
        again, _ = attend(module, query, key, value, None)
        assert torch.equal(first, again)
        with pytest.raises(ValueError, match="dtype"):
            attend(module, query, key.codes, value.codes, None)


@pytest.mark.parametrize("what", ["scales", "mean", "first"])
def test_a_record_that_does_not_belong_to_its_codes_is_refused(what: str) -> None:
    """The memory behind it would be read all the same."""
    module, tokens = layer(), StoredTokens(*(torch.zeros(1, 2, 0, 32),) * 2, "int8")
    keys = torch.randn(1, 2, 20, 32)
    tokens.append(keys, keys)
    query = torch.randn(1, 4, 1, 32)
    with torch.no_grad():
        attend(module, query, *tokens.carriers(), None)
        key, value = tokens.carriers()
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
