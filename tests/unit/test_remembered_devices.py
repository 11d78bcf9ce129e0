"""A call that is remembered is repeated for tensors like the first ones alone: of their devices, and of their kind."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import causal_mask_function

from adaattn_hf.patches.cache.layers import CachedLayer
from adaattn_hf.patches.mask.masks import adaattn_mask
from adaattn_hf.patches.mask.structured_mask import StructuredMask

from ..support.choices import make_choice
from ..support.plans import give

NAMES = ("adaattn", "adaattn_sdpa", "adaattn_native", "adaattn_eager")


def serve(name: str) -> Any:
    return AttentionInterface._global_mapping[name]


def layer(**settings: Any) -> nn.Module:
    module = nn.Module()
    vars(module).update(is_causal=True, config=LlamaConfig(**settings))
    return module


def drawn(length: int) -> list[Tensor]:
    return [torch.randn(1, heads, length, 16) for heads in (4, 2, 2)]


def said(call: Callable[[], Any]) -> str:
    with pytest.raises(ValueError, match="got") as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_tensors_elsewhere_are_refused_as_by_the_first_call(name: str, masked: bool) -> None:
    module, attend = layer(), serve(name)
    good = drawn(23)
    for where in ((1,), (2,), (1, 2), (0,)):
        mask = None
        if masked:
            mask = adaattn_mask(1, 23, 23, mask_function=causal_mask_function, config=module.config)
            assert isinstance(mask, StructuredMask)
        bad = [t.to("meta") if i in where else t for i, t in enumerate(good)]

        def refused(mask: Any = mask, bad: Any = bad) -> str:
            return said(lambda: attend(module, *bad, mask))

        first = refused()
        with torch.no_grad():
            right = [attend(module, *good, mask)[0] for _ in range(3)]
            assert refused() == first
            assert torch.equal(attend(module, *good, mask)[0], right[-1])
        assert "expected one device" in first


@pytest.mark.parametrize("name", NAMES)
def test_an_additive_or_boolean_mask_elsewhere_is_refused(name: str) -> None:
    module, attend, good = layer(), serve(name), drawn(21)
    mask = torch.ones(1, 1, 21, 21, dtype=torch.bool).tril()
    for _ in range(2):
        attend(module, *good, mask)
    assert "attention_mask: got a tensor on meta" in said(lambda: attend(module, *good, mask.to("meta")))


@pytest.mark.parametrize("what", ["key_scale", "value_scale", "key_mean", "first_key"])
@pytest.mark.parametrize("name", ["adaattn", "adaattn_native", "adaattn_eager"])
def test_what_turns_codes_into_numbers_lies_with_them(name: str, what: str) -> None:
    module, attend, query = layer(), serve(name), torch.randn(1, 4, 1, 32)
    cached = CachedLayer("int8")
    cached.update(torch.randn(1, 2, 19, 32), torch.randn(1, 2, 19, 32))
    for _ in range(2):
        with torch.no_grad():
            key, value = cached.keys, cached.values
            record: Any = key.record
            own = getattr(record, what)
            setattr(record, what, (torch.zeros(1, 2, 32) if own is None else own).to("meta"))
            moved = said(lambda key=key, value=value: attend(module, query, key, value, None))
            assert moved.startswith(f"stored.{what}: got a tensor on meta for codes on cpu")
            for _ in range(2):
                attend(module, query, cached.keys, cached.values, None)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("where", [(0, 1, 2), (1,), (2,)])
def test_tensors_without_memory_are_known_from_those_with_it(name: str, where: tuple[int, ...]) -> None:
    module, attend, good = layer(), serve(name), drawn(22)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = [mode.from_tensor(t) if i in where else t for i, t in enumerate(good)]
    for _ in range(2):
        if name == "adaattn_native":
            with pytest.raises(RuntimeError, match="memory, which tensors that trace, wrap or shard"):
                attend(module, *fake, None)
        else:
            out = attend(module, *fake, None)[0]
            assert isinstance(out, FakeTensor)
            assert out.shape == (1, 22, 4, 16)
        for _ in range(2):
            assert type(attend(module, *good, None)[0]) is Tensor


@pytest.mark.parametrize("name", ["adaattn", "adaattn_sdpa"])
def test_layers_under_a_plan(name: str) -> None:
    config = LlamaConfig(
        vocab_size=61, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation=name,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    give(model, make_choice("window", 8, 2), layers=(0, 1), lengths=(256,))
    modules, attend = [block.self_attn for block in model.model.layers], serve(name)
    good = drawn(24)
    bad = good[0], good[1].to("meta"), good[2]
    with torch.no_grad():
        first = said(lambda: attend(modules[0], *bad, None))
        for module in modules * 2:
            attend(module, *good, None)
        assert said(lambda: attend(modules[1], *bad, None)) == first
