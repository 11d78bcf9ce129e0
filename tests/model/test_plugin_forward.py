"""One forward pass of whole models, with every kind of padding, against stock eager attention."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from adaattn_hf.attention.listeners import listening
from adaattn_hf.backends.select import BACKENDS

from ..support.models import (
    DECODERS,
    ENCODER_DECODERS,
    ENCODERS,
    HIDDEN,
    answers,
    assert_same,
    fresh_pair,
    padding,
    pair,
    tokens,
)
from ..support.recorder import Recorder

SIDES = ("none", "ones", "left", "right", "holes")
FORCED = ("adaattn_sdpa", "adaattn_eager", "adaattn_native")


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_forward_equals_eager(name: str, side: str) -> None:
    """To 2e-6 of the largest logit in fp32; those of stock sdpa are up to 5e-7 away."""
    stock, ours = pair(name)
    mask = padding(side)
    expected, actual = answers(stock, ours, input_ids=tokens(), attention_mask=mask)
    assert_same(expected, actual, mask, rtol=2e-6)


@pytest.mark.parametrize("implementation", ["adaattn", *FORCED])
@pytest.mark.parametrize("side", ["none", "left", "right", "holes"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral-window", "llama4-chunked", "bert", "modernbert-local"])
def test_rows_of_padding_are_those_of_stock_sdpa(name: str, side: str, implementation: str) -> None:
    """All rows are: those that see a key, and those that see none, which eager attention alone averages."""
    lacking = BACKENDS.get(implementation.removeprefix("adaattn_"))
    if lacking is not None and lacking.missing():
        pytest.skip("; ".join(lacking.missing()))
    stock, ours = fresh_pair(name, implementation)
    stock.set_attn_implementation("sdpa")
    expected, actual = answers(stock, ours, input_ids=tokens(), attention_mask=padding(side))
    assert_same(expected, actual)


@pytest.mark.parametrize("name", ["gpt2", "bert-decoder"])
def test_cross_attention_equals_eager(name: str) -> None:
    stock, ours = fresh_pair(name, add_cross_attention=True)
    encoder_mask = torch.ones(3, 5, dtype=torch.long)
    encoder_mask[1, 3:] = 0
    encoder_mask[2, :] = 0  # an example without any encoder token: its rows see nothing
    states = torch.randn(3, 5, HIDDEN, generator=torch.Generator().manual_seed(3))
    told = {"encoder_hidden_states": states, "encoder_attention_mask": encoder_mask}
    mask = padding("left")
    expected, actual = answers(stock, ours, input_ids=tokens(), attention_mask=mask, **told)
    # eager spreads a row that sees nothing evenly over padding; ours gives zeros, so that example is not compared
    assert_same(expected[:2], actual[:2], mask[:2])
    assert torch.isfinite(actual).all()


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
@pytest.mark.parametrize("kind", ["bool", "float", "float per head"])
def test_four_dimensional_mask_equals_eager(name: str, kind: str) -> None:
    stock, ours = pair(name)
    keep = torch.ones(11, 11, dtype=torch.bool)
    if name != "bert":
        keep = keep.tril()
    heads = 4 if kind == "float per head" else 1
    drawn = torch.rand(3, heads, 11, 11, generator=torch.Generator().manual_seed(5)) > 0.3
    keep = keep & drawn | torch.eye(11, dtype=torch.bool)
    added = torch.where(keep, 0.0, torch.finfo(torch.float32).min)
    (expected,) = answers(stock, input_ids=tokens(), attention_mask=added)
    (actual,) = answers(ours, input_ids=tokens(), attention_mask=keep if kind == "bool" else added)
    assert_same(expected, actual)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_causality_can_be_switched_off_per_call(name: str) -> None:
    stock, ours = pair(name)
    for mask in (None, padding("left")):
        inputs = dict(input_ids=tokens(), attention_mask=mask, is_causal=False, use_cache=False)
        expected, actual = answers(stock, ours, **inputs)
        (causal,) = answers(ours, input_ids=tokens(), attention_mask=mask, use_cache=False)
        assert_same(expected, actual, mask)
        assert float((actual - causal).abs().max()) > 1e-2


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_bfloat16_and_autocast_stay_near_fp32(name: str) -> None:
    """Both within twice the distance that stock eager attention has from fp32 in the same precision."""
    stock, ours = fresh_pair(name)
    mask = padding("left")
    inputs = {"input_ids": tokens(), "attention_mask": mask}
    (exact,) = answers(stock, **inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stock_cast, ours_cast = answers(stock, ours, **inputs)
    stock_half, ours_half = answers(stock.to(torch.bfloat16), ours.to(torch.bfloat16), **inputs)
    assert ours_cast.dtype == stock_cast.dtype
    assert ours_half.dtype == torch.bfloat16
    for theirs, mine in ((stock_cast, ours_cast), (stock_half, ours_half)):
        theirs_off = (theirs.float() - exact).abs()[mask.bool()]
        mine_off = (mine.float() - exact).abs()[mask.bool()]
        assert float(mine_off.max()) <= 2 * float(theirs_off.max())
        assert float(mine_off.mean()) <= 1.5 * float(theirs_off.mean())


@pytest.mark.parametrize("name", ["adaattn", "adaattn_eager", "adaattn_sdpa"])
def test_autocast_leaves_fp64_alone(name: str) -> None:
    stock, ours = (model.double() for model in fresh_pair("llama", name))
    with torch.autocast("cpu", torch.bfloat16):
        right, found = answers(stock, ours, input_ids=tokens())
    torch.testing.assert_close(found, right, atol=1e-5, rtol=0)
    assert right.dtype == torch.float64


@contextmanager
def registered(name: str, function: Any) -> Iterator[None]:
    """An implementation under a name of its own, with stock masks, taken out again."""
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, sdpa_mask)
    try:
        yield
    finally:
        AttentionInterface._global_mapping.pop(name)
        AttentionMaskInterface._global_mapping.pop(name)


def ignores_padding(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    causal = bool(getattr(module, "is_causal", False))
    out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=kwargs.get("scaling"))
    return out.transpose(1, 2), None


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_the_comparison_notices_a_forgotten_mask(name: str) -> None:
    """The tests above can fail: an implementation that ignores padding passes without padding alone."""
    with registered("forgetful", ignores_padding):
        stock, wrong = fresh_pair(name, "forgetful")
        mask = padding("left")
        assert_same(*answers(stock, wrong, input_ids=tokens()))
        with pytest.raises(AssertionError, match="largest difference"):
            assert_same(*answers(stock, wrong, input_ids=tokens(), attention_mask=mask), mask)


def test_upcast_attention_of_gpt2_is_computed_in_fp32() -> None:
    """`reorder_and_upcast_attn` asks for fp32 scores in a half-precision GPT-2."""
    _, upcast = fresh_pair("gpt2", reorder_and_upcast_attn=True)
    recorder = Recorder()
    with torch.no_grad(), listening(recorder):
        upcast.to(torch.bfloat16)(input_ids=tokens())
    assert [kind.dtype for _, kind, _ in recorder.calls] == [torch.float32] * 2


@pytest.mark.parametrize("implementation", ["adaattn", *FORCED])
def test_a_mask_of_all_keys_is_refused_where_a_window_keeps_the_last_ones(implementation: str) -> None:
    """The layers' keys are the mask's last columns; stock attention refuses it, too."""
    stock, ours = pair("mistral-window", implementation)
    ids, mask = tokens(1, 8), torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
    for model in (stock, ours):
        with torch.no_grad():
            cache = model(input_ids=ids[:, :6], attention_mask=mask[:, :, :6, :6], use_cache=True).past_key_values
            with pytest.raises((ValueError, RuntimeError), match=r"attention_mask: got shape|The size of"):
                model(input_ids=ids[:, 6:7], attention_mask=mask[:, :, 6:7, :7], past_key_values=cache)


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "mistral-window", "t5"])
def test_weights_equal_eager(name: str, side: str) -> None:
    stock, ours = pair(name)
    ids, mask = tokens(), padding(side)
    inputs = dict(input_ids=ids, attention_mask=mask, output_attentions=True)
    kinds = ["attentions"]
    if name in ENCODER_DECODERS:
        inputs["decoder_input_ids"] = ids[:, :5]
        kinds = ["encoder_attentions", "decoder_attentions", "cross_attentions"]
    with torch.no_grad():
        expected, actual = stock(**inputs), ours(**inputs)
    for kind in kinds:
        layers, found = getattr(expected, kind), getattr(actual, kind)
        assert len(layers) == len(found) > 0
        for weights, ours_weights in zip(layers, found, strict=True):
            rows = None
            if mask is not None and kind in ("attentions", "encoder_attentions"):
                rows = mask[:, None, :].expand(-1, weights.shape[1], -1)
            assert_same(weights, ours_weights, rows)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_weights_of_a_cached_step_equal_eager(name: str) -> None:
    stock, ours = pair(name)
    ids, mask = tokens(), padding("left")
    settings = dict(attention_mask=mask, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
    with torch.no_grad():
        expected = stock.generate(ids, **settings, output_attentions=True)
        actual = ours.generate(ids, **settings, output_attentions=True)
    assert len(expected.attentions) == len(actual.attentions) == 3
    for step, (layers, found) in enumerate(zip(expected.attentions, actual.attentions, strict=True)):
        for weights, ours_weights in zip(layers, found, strict=True):
            rows = mask[:, None, :].expand(-1, weights.shape[1], -1) if step == 0 else None
            assert_same(weights, ours_weights, rows)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_nobody_gets_weights_unasked(name: str) -> None:
    _, ours = pair(name)
    with torch.no_grad():
        assert ours(input_ids=tokens()).attentions is None
