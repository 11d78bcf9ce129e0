"""Keywords handed to the attention: served, harmless, or refused by name."""

import ast
import inspect
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.loss import loss_utils

import adaattn_hf
from adaattn_hf.attention import reference
from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.patches.call import interface, refusals
from adaattn_hf.patches.call.refusals import IGNORED_KEYWORDS, MEANINGFUL_KEYWORDS

from ..support.models import fresh_pair, tokens
from ..support.versions import needs_tracing

torch.manual_seed(0)
QUERY, KEY, VALUE = torch.randn(3, 1, 2, 6, 8).unbind()
CHANGING = ("alibi", "attention_bias", "head_mask", "logits_soft_cap", "window_size", "invented")


def called(**keywords: Any) -> Tensor:
    return interface.attention_function()(nn.Module(), QUERY, KEY, VALUE, None, **keywords)[0]


def served() -> set[str]:
    """What the function names, and what it reads of the rest."""
    named = inspect.signature(interface.attention_function()).parameters
    return {name for name, one in named.items() if one.kind is not one.VAR_KEYWORD} | MEANINGFUL_KEYWORDS


@pytest.mark.parametrize("name", CHANGING)
def test_a_keyword_that_nobody_knows_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: got Tensor from Module.*leave it out.*'sdpa'"):
        called(**{name: torch.ones(2)})
    assert torch.equal(called(**{name: None}), called())


@pytest.fixture
def forgotten() -> Iterator[None]:
    """What this test allows is allowed to nobody else."""
    before = set(refusals.ALLOWED_KEYWORDS)
    yield
    refusals.ALLOWED_KEYWORDS.intersection_update(before)


def options() -> set[str]:
    """What the losses of the installed Transformers can be told beyond what a model itself passes."""
    losses = (*loss_utils.LOSS_MAPPING.values(), loss_utils.fixed_cross_entropy)
    found = (one for loss in losses for one in inspect.signature(loss).parameters.values())
    return {one.name for one in found if one.kind is not one.VAR_KEYWORD and one.default is not one.empty}


def test_options_of_the_losses_of_transformers_pass() -> None:
    assert options() <= IGNORED_KEYWORDS
    assert {"ignore_index", "num_items_in_batch", "shift_labels"} <= options()


@pytest.mark.parametrize("name", ["text_mask", "config", "targets", "vocab_size"])
def test_what_a_model_itself_passes_to_its_loss_is_no_option(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: got int"):
        called(**{name: 3})


def test_a_loss_of_transformers_is_told_its_options() -> None:
    """Through a model, whose second pass takes the short way."""
    stock, ours = fresh_pair("llama")
    ids = tokens()
    labels = ids.masked_fill(ids % 3 == 0, -7)
    asked = {"labels": labels, "ignore_index": -7}
    right = stock(ids, **asked).loss
    assert not torch.isclose(right, stock(ids, labels=ids).loss)
    for _ in range(3):
        torch.testing.assert_close(ours(ids, **asked).loss, right, atol=1e-5, rtol=0)


def focal(logits: Tensor, labels: Tensor, vocab_size: int, gamma: float, *, floor: Any = 0.0, **_: Any) -> Any:
    """A loss with keywords of its own."""
    return logits.float().logsumexp(2).mean() * gamma + floor


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_tracing)])
def test_keywords_of_a_loss_are_allowed_by_name(compiled: bool) -> None:
    stock, ours = fresh_pair("llama", num_hidden_layers=1)
    ids = tokens()
    asked: dict[str, Any] = {"labels": ids, "gamma": 2.0, "floor": torch.tensor(1.0)}
    for model in (stock, ours):
        model.loss_function = focal
    call = torch.compile(ours, fullgraph=True, backend="eager") if compiled else ours
    right = stock(ids, **asked).loss
    with pytest.raises((ValueError, RuntimeError), match=r"gamma: got float.*allow_keywords\('gamma'\)"):
        call(ids, **asked)
    adaattn_hf.allow_keywords("gamma", "floor")
    for _ in range(3):
        torch.testing.assert_close(call(ids, **asked).loss, right, atol=1e-5, rtol=1e-5)
    with pytest.raises((ValueError, RuntimeError), match="slope"):
        call(ids, **asked, slope=1.0)


def test_what_one_model_was_called_with_allows_nothing_to_another() -> None:
    """A loss that takes a keyword lets nothing pass, be its model alive or gone."""
    first, second = (fresh_pair("llama").ours for _ in range(2))
    first.loss_function = focal
    for model in (first, second):
        for _ in range(2):
            with pytest.raises(ValueError, match="gamma: got Tensor"):
                model(tokens(), labels=tokens(), gamma=torch.ones(3))


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("name", [3, "two words", *sorted(MEANINGFUL_KEYWORDS)])
def test_no_keyword_that_changes_attention_can_be_allowed(name: Any) -> None:
    with pytest.raises(ValueError, match=r"^names: got"):
        adaattn_hf.allow_keywords("fine", name)
    with pytest.raises(ValueError, match=r"^fine: got int"):
        called(fine=3)


def test_places_behind_the_mask_are_those_of_sdpa() -> None:
    """Libraries that wrap every registered function (kvpress) hand the dropout by its place."""
    stock = list(inspect.signature(transformers.integrations.sdpa_attention.sdpa_attention_forward).parameters)
    assert list(inspect.signature(interface.attention_function()).parameters)[:8] == stock[:8]
    placed = interface.attention_function()(nn.Module(), QUERY, KEY, VALUE, None, 0.0, 0.5)[0]
    assert torch.equal(placed, called(scaling=0.5))


@pytest.mark.parametrize("queries", [6, 3, 1])
@pytest.mark.parametrize("causal", [False, True])
def test_a_mask_of_keys_alone_leaves_causality_to_the_layer(causal: bool, queries: int) -> None:
    """As flash-attn's callers hand it over, whose queries are the last of the tokens."""
    module = nn.Module()
    module.is_causal = causal  # type: ignore[assignment]
    real = torch.tensor([[False, True, True, True, True, True]])
    given = QUERY[:, :, -queries:], KEY, VALUE
    found = interface.attention_function()(module, *given, real)[0]
    seen = real[:, None, None].expand(1, 1, 6, 6)
    seen = (seen.tril() if causal else seen)[:, :, -queries:]
    truth = reference.attention(AttentionCall(*given, MaskStructure(1, queries, 6, mask=seen), 8**-0.5)).out
    torch.testing.assert_close(found.double(), truth.double(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("scaling", [0.0, 0, -0.5])
@pytest.mark.parametrize("bias", [None, torch.randn(1, 2, 6, 6)])
@pytest.mark.parametrize("backend", [None, "sdpa"])
def test_any_scaling_leaves_hidden_keys_hidden(backend: str | None, bias: Any, scaling: float) -> None:
    """torch's causal CPU kernel makes not-a-numbers of scalings that are not above zero."""
    ours = interface.attention_function(backend)
    asked = {"scaling": scaling, "is_causal": True, "position_bias": bias}
    found = [ours(nn.Module(), QUERY, KEY, VALUE, None, **asked)[0] for _ in range(2)]
    call = AttentionCall(QUERY, KEY, VALUE, MaskStructure(1, 6, 6, causal=True), scaling, bias=bias)
    truth = reference.attention(call).out
    assert all(float((out - truth).abs().max()) < 1e-5 for out in found)


@pytest.mark.parametrize("name", sorted(IGNORED_KEYWORDS))
def test_a_harmless_keyword_changes_nothing(name: str) -> None:
    assert name not in served()
    assert torch.equal(called(**{name: torch.ones(2)}), called())


@pytest.mark.parametrize(("keyword", "field", "value"), [
    ("softcap", "softcap", 0.5), ("s_aux", "sink_logits", torch.tensor([0.5, 2.0])),
    ("position_bias", "bias", torch.randn(1, 2, 6, 6)),
])  # fmt: skip
def test_a_served_keyword_changes_what_is_computed(keyword: str, field: str, value: Any) -> None:
    call = AttentionCall(QUERY, KEY, VALUE, MaskStructure(1, 6, 6), 8**-0.5, **{field: value})
    found = called(**{keyword: value})
    assert float((found - reference.attention(call).out).abs().max()) < 1e-5
    assert float((found - called()).abs().max()) > 1e-2


def test_a_model_hands_them_on() -> None:
    """The second pass of which takes the short way."""
    _, model = fresh_pair("llama")
    ids = tokens()
    with torch.no_grad():
        plain = [model(ids).logits for _ in range(2)][1]
        assert torch.equal(model(ids, token_type_ids=torch.zeros_like(ids)).logits, plain)
        with pytest.raises(ValueError, match="alibi: got Tensor from LlamaAttention"):
            model(ids, alibi=torch.ones(4))


def attention_calls(source: str) -> Iterator[Any]:
    """The attention calls of a source, each up to the bracket that makes it one: whole modules take long to parse."""
    for start in re.finditer(r"(?<![\w.])(?<!def )attention_interface\(", source):
        rest = source[start.start() :]
        for end in re.finditer(r"\)", rest):
            with suppress(SyntaxError):
                yield ast.parse(rest[: end.end()], mode="eval").body
                break


def unknown_in(source: str) -> set[str]:
    """Keywords of a source's attention calls that are neither served nor harmless."""
    asked = {word.arg for call in attention_calls(source) for word in call.keywords if word.arg}
    return asked - served() - IGNORED_KEYWORDS


def test_every_keyword_of_every_family_is_known() -> None:
    """All attention calls in the installed Transformers; what a model passes on of its own inputs is not seen here."""
    families = (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")
    sources = {path: path.read_text(encoding="utf-8") for path in families}
    routed = {path: text for path, text in sources.items() if "attention_interface(" in text}
    assert len(routed) > 200
    unknown = {path.name: names for path, text in routed.items() if (names := unknown_in(text))}
    assert not unknown
    assert unknown_in("attention_interface(self, q, k, v, mask, scaling=1.0, slopes=s)") == {"slopes"}
