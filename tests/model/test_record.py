"""`record`: what it says of a model is what the attention weights say; nothing of it stays behind."""

from typing import Any

import pytest
import torch
import transformers as tf

import adaattn_hf
from adaattn_hf.patches.observe.record import record
from adaattn_hf.plans.choices import Choice

from ..support.choices import make_choice
from ..support.models import fresh_pair, pair, tokens
from ..support.plans import plan_for


@pytest.fixture(scope="module")
def llama() -> Any:
    return pair("llama").ours


def test_entropy_is_that_of_the_weights(llama: tf.PreTrainedModel) -> None:
    ids = tokens(1, 24)
    with record(llama, rows=24) as seen, torch.no_grad():
        llama(ids, use_cache=False)
    with torch.no_grad():
        attentions = llama(ids, use_cache=False, output_attentions=True).attentions
    found = seen.to_dict()["layers"]
    assert [entry["layer"] for entry in found] == list(range(len(attentions)))
    for entry, weights in zip(found, attentions, strict=True):
        heads = entry["phases"]["prefill"]["heads"]
        by_hand = -torch.xlogy(weights, weights).sum(-1).mean((0, 2))
        assert heads["entropy"] == pytest.approx(by_hand.tolist(), abs=1e-4)
        assert heads["sink_mass"] == pytest.approx(weights[..., :4].sum(-1).mean((0, 2)).tolist(), abs=1e-4)
        assert min(heads["sqnr_answer"]) > 90


def test_a_bias_for_all_queries_is_that_of_every_query(llama: tf.PreTrainedModel) -> None:
    ids, bias = tokens(2, 12), torch.linspace(-3, 0, 12)[None, None, None]
    found = []
    for given in (bias, bias.expand(2, 4, 12, 12)):
        with record(llama) as seen, torch.no_grad():
            llama(ids, attention_mask=given, use_cache=False)
        found.append(seen.to_dict()["layers"])
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["llama", "bert"])
@pytest.mark.parametrize("right", [False, True])
def test_rows_of_padding_are_not_in_what_is_recorded(name: str, right: bool) -> None:
    model = pair(name).ours
    ids, mask = tokens(1, 24), torch.ones(1, 24, dtype=torch.long)
    real = slice(None, 15) if right else slice(9, None)
    mask[:, 15:] = mask[:, :9] = 0
    mask[:, real] = 1
    found = []
    for inputs in ({"input_ids": ids, "attention_mask": mask}, {"input_ids": ids[:, real]}):
        positions = (inputs.get("attention_mask", torch.ones(1, 15)).cumsum(1) - 1).clamp(min=0).long()
        with record(model, rows=24) as seen, torch.no_grad():
            model(**inputs, position_ids=positions)
        (layer, *_) = seen.to_dict()["layers"]
        (phase,) = layer["phases"].values()
        found.append(phase["heads"]["entropy"])
    assert found[0] == pytest.approx(found[1], abs=1e-4)


def test_phases_are_told_apart(llama: tf.PreTrainedModel) -> None:
    ids = tokens(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    packed = torch.cat([torch.arange(8), torch.arange(12)])[None]
    with record(llama, rows=8) as seen, torch.no_grad():
        llama(ids, use_cache=False)
        llama(ids, attention_mask=mask, use_cache=False)
        llama(ids[:1], position_ids=packed, use_cache=False)
        greedy = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
        llama.generate(ids[:1], **greedy)  # type: ignore[operator]
    phases = seen.to_dict()["layers"][0]["phases"]
    assert {name: phases[name]["calls"] for name in phases} == {"prefill": 2, "padded": 1, "packed": 1, "decode": 2}
    assert min(min(entry["heads"]["sqnr_answer"]) for entry in phases.values()) > 90
    assert sum(seen.to_dict()["layers"][0]["backends"].values()) == 6
    assert "decode" in str(seen)
    assert seen.figure("padded").axes
    with pytest.raises(ValueError, match="expected one that was seen"):
        seen.figure("training")


def test_maps_are_kept_of_the_heads_that_were_asked_for(llama: tf.PreTrainedModel) -> None:
    ids = tokens(1, 24)
    with record(llama, maps=((1, 0), (9, 0))) as seen, torch.no_grad():
        llama(ids, use_cache=False)
        weights = llama(ids, use_cache=False, output_attentions=True).attentions[1][0, 0]
    (image,) = seen.to_dict()["maps"]
    torch.testing.assert_close(torch.tensor(image["weights"]), weights, rtol=1e-3, atol=1e-5)
    assert seen.maps[9, 0] is None


@pytest.mark.parametrize(
    "choice", [make_choice("window", 4), make_choice("window", 8, 1, precision="int8"), make_choice(precision="bf16")],
    ids=lambda choice: choice.label,
)  # fmt: skip
def test_the_error_of_a_plan_is_exact_minus_what_it_computes(choice: Choice) -> None:
    ids, model = tokens(1, 96), fresh_pair("llama").ours.eval()
    plan = plan_for(model, choice, layers=(1,), lengths=(96,))
    with record(model, maps=((0, 1), (1, 3)), against=plan) as seen, torch.no_grad():
        model(ids, use_cache=False)
        exact = model(ids, use_cache=False, output_attentions=True).attentions[1][0, 3]
        with adaattn_hf.use_plan(model, plan, unverified=True):
            planned = model(ids, use_cache=False, output_attentions=True).attentions[1][0, 3]
    first, second = seen.to_dict()["maps"]
    assert not torch.tensor(first["error"]).any()  # the plan leaves that layer exact
    found = torch.tensor(second["error"])
    assert found.any()
    torch.testing.assert_close(found, exact - planned, rtol=1e-3, atol=2e-5)


def test_a_prompt_beyond_a_plan_has_no_error_map() -> None:
    model = fresh_pair("llama").ours.eval()
    plan = plan_for(model, make_choice("window", 4), lengths=(16,))
    with (
        record(model, maps=((1, 0),), against=plan),
        torch.no_grad(),
        pytest.raises(ValueError, match="has 24 tokens, and the plan speaks for 16"),
    ):
        model(tokens(1, 24), use_cache=False)


def test_nothing_stays_behind(llama: tf.PreTrainedModel) -> None:
    def hooks() -> int:  # Transformers itself leaves some where weights were asked for
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in llama.modules())

    ids, before = tokens(1, 8), hooks()
    with pytest.raises(ZeroDivisionError), record(llama) as seen:
        _ = 1 / 0
    with torch.no_grad():
        llama(ids)
    assert seen.to_dict()["layers"] == []
    assert "no attention call" in str(seen)
    assert hooks() == before
    with record(llama) as seen, torch.no_grad():
        fresh_pair("llama").ours(ids)  # another model in the block is not recorded
    assert seen.to_dict()["layers"] == []


def test_stock_attention_and_no_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="not one of AdaAttn's"), record(pair("llama").stock):
        pass
    with pytest.raises(ValueError, match="at least 1"), adaattn_hf.record(pair("llama").ours, rows=0):
        pass
