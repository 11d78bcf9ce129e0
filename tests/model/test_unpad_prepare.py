"""Preparing and restoring: what is refused and why, what is left behind, how libraries and trainers get along."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import adaattn_hf
from adaattn_hf.patches.cache.layers import CachedLayer
from adaattn_hf.patches.unpad import hooks, packing
from adaattn_hf.plans.choices import Choice, Window

from ..support.families import LISTED, configured, models
from ..support.models import BATCH, HIDDEN, VOCABULARY, assert_same, build, config_of, fresh_pair, padding, tokens
from ..support.plans import plan_for
from .test_training import arguments, examples
from .test_unpad import UNPADDED


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_where_the_host_decides_a_batch_keeps_its_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor stands in for a GPU: small batches run as stock's, without a look at the mask, large ones packed."""
    monkeypatch.setattr(packing, "QUEUED", ("cpu",))
    (stock, ours), mask = fresh_pair("bert"), padding("right")
    adaattn_hf.prepare(ours)
    with torch.no_grad():
        expected, found = (model(input_ids=tokens(), attention_mask=mask) for model in (stock, ours))
    assert_same(expected[0], found[0], mask)
    (reason,) = adaattn_hf.unpad_calls(ours)
    assert "takes a GPU no longer than its host" in reason
    monkeypatch.setattr(packing, "LEAST_STATES", HIDDEN)
    _, larger = fresh_pair("bert")
    adaattn_hf.prepare(larger)
    larger(input_ids=tokens(), attention_mask=mask)
    assert adaattn_hf.unpad_calls(larger) == {UNPADDED: 1}


TOWER = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "image_size": 8, "patch_size": 4,
}  # fmt: skip


def refusal_of(model: nn.Module) -> str:
    before = hooks_of(model)
    with pytest.raises(adaattn_hf.PrepareError) as caught:
        adaattn_hf.prepare(model)
    assert hooks_of(model) == before, "a refused model must be left as it was"
    return str(caught.value)


def test_another_implementation_is_refused() -> None:
    model = tf.BertModel._from_config(config_of("bert"), attn_implementation="sdpa")
    message = refusal_of(model)
    assert "'sdpa'" in message
    assert message.endswith('call model.set_attn_implementation("adaattn")')


@pytest.mark.parametrize(("kind", "cls", "changes", "words"), [
    ("t5", tf.T5ForConditionalGeneration, {}, "encoder-decoder"),
    ("bert", tf.BertModel, {"is_decoder": True, "add_cross_attention": True}, "cross-attention"),
    ("t5", tf.T5EncoderModel, {"is_encoder_decoder": False}, "relative position"),
    ("convbert", tf.ConvBertModel, {}, "convolutions"),
    (
        "jamba", tf.JambaForCausalLM,
        {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "use_mamba_kernels": False},
        "from one packed row into the next",
    ),
    ("clip", tf.CLIPModel, {"text_config": TOWER, "vision_config": TOWER}, "several towers"),
    *((name, tf.AutoModelForCausalLM, changes, "its indexer") for name, changes in LISTED["sparse"].items()),
])  # fmt: skip
def test_what_mixes_rows_attends_across_or_has_several_towers_is_refused(
    kind: str, cls: Any, changes: dict[str, Any], words: str
) -> None:
    build = getattr(cls, "from_config", None) or cls._from_config
    model = build(configured(kind, changes), attn_implementation="adaattn")
    assert words in refusal_of(model)


def test_keys_that_are_chosen_over_all_rows_keep_their_padding() -> None:
    pair = models("doge", {"keep_window_size": 20}, tf.AutoModelForCausalLM)
    ids, mask = tokens(length=30), padding("left", length=30)
    adaattn_hf.prepare(pair.ours)
    with torch.no_grad():
        stock, ours = (model(input_ids=ids, attention_mask=mask).logits for model in pair)
    assert_same(stock, ours, mask)
    assert "keep_window_size" in "".join(adaattn_hf.unpad_calls(pair.ours))


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
LONG["original_max_position_embeddings"] = 8
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
CHUNKS = {"floor_scale": 18, "attn_scale": 1.0, "no_rope_layers": [0, 0]}


@pytest.mark.parametrize(("family", "changes", "words"), [
    ("esm", {"token_dropout": True, "mask_token_id": 7}, "share of masked tokens"),
    ("llama4_text", CHUNKS, "floor_scale"),
    ("llama", {"max_position_embeddings": 8, "rope_parameters": DYNAMIC}, "largest position"),
    ("phi3", {"original_max_position_embeddings": 8, "rope_parameters": LONG}, "largest position"),
])  # fmt: skip
@pytest.mark.parametrize("given", [False, True])
def test_numbers_that_go_by_the_padded_row_are_those_of_the_padded_form(
    family: str, changes: dict[str, Any], words: str, given: bool
) -> None:
    """Whole columns of padding, as of texts that are padded to a length; a row with masked tokens beside others."""
    pair = models(family, changes, tf.AutoModel if family == "esm" else tf.AutoModelForCausalLM)
    ids, mask = tokens(length=16), torch.ones(BATCH, 16, dtype=torch.long)
    mask[0, 4:], mask[1:, 7:], ids[ids == 7], ids[1, 2:4] = 0, 0, 8, 7
    positions = {"position_ids": torch.arange(16)[None]} if given else {}
    adaattn_hf.prepare(pair.ours)
    with torch.no_grad():
        stock, ours = (model(input_ids=ids, attention_mask=mask, **positions)[0] for model in pair)
        assert_same(stock, ours, mask)
        assert words in "".join(adaattn_hf.unpad_calls(pair.ours))
        pair.ours(input_ids=tokens(length=7).clamp_min(8), attention_mask=padding("right", length=7), **{
            name: value[:, :7] for name, value in positions.items()})  # fmt: skip
    assert adaattn_hf.unpad_calls(pair.ours)[UNPADDED] == 1


def test_attention_that_is_not_ours_is_refused() -> None:
    model = tf.MptForCausalLM(tf.MptConfig(d_model=HIDDEN, n_heads=4, n_layers=1, vocab_size=VOCABULARY))
    model.config._attn_implementation = "adaattn"
    message = refusal_of(model)
    assert "attention interface" in message
    assert "takes no position_ids" in message


def test_a_model_that_mixes_neighbours_unseen_is_found_out() -> None:
    """No attribute tells that this model looks at the token before: the test batch does."""
    model = fresh_pair("llama").ours

    def add_previous(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output + output.roll(1, dims=1)

    model.model.layers[0].mlp.register_forward_hook(add_previous)
    assert "of a test batch differs" in refusal_of(model)


def test_the_test_batch_leaves_no_trace() -> None:
    model = fresh_pair("llama").ours.train()
    model.model.layers[0].eval()
    state = torch.random.get_rng_state()
    adaattn_hf.prepare(model)
    assert torch.equal(state, torch.random.get_rng_state())
    assert model.training
    assert not model.model.layers[0].training
    assert adaattn_hf.unpad_calls(model) == {}
    assert all(p.grad is None for p in model.parameters())


def test_wrong_arguments_are_told() -> None:
    for call, expected in ((adaattn_hf.prepare, "a loaded model"), (adaattn_hf.check, "a loaded model or its config")):
        with pytest.raises(TypeError, match=f"model: got 'gpt2', expected {expected}.*; load it with AutoModel"):
            call("gpt2")  # type: ignore[operator, type-var]
    with pytest.raises(adaattn_hf.PrepareError, match="holds no Transformers model"):
        adaattn_hf.prepare(nn.Linear(2, 2))


def test_calls_are_counted_by_what_they_need() -> None:
    model = adaattn_hf.prepare(fresh_pair("llama").ours)
    mask = padding("right")
    with torch.no_grad():
        model(tokens(), attention_mask=mask, labels=tokens())
        model(tokens())
        model(tokens(), attention_mask=torch.ones_like(mask))
        model(tokens(), attention_mask=mask)
    assert hooks._frames.get() == ()
    calls = adaattn_hf.unpad_calls(model)
    assert calls == {
        "no attention_mask": 1, "no padding": 1, UNPADDED: 1, "a label is scored at a padding position": 1,
    }  # fmt: skip


REASONS: dict[str, dict[str, Any]] = {
    "attention_mask is not the 2-D mask of the padding": dict(attention_mask=torch.ones(BATCH, 1, 11, 11).tril() > 0),
    "already packed (cu_seq_lens_q)": dict(
        input_ids=tokens(batch=1), attention_mask=torch.tensor([[1] * 9 + [0] * 2]),
        cu_seq_lens_q=torch.tensor([0, 4, 11], dtype=torch.int32),
    ),
    "nothing but padding": dict(attention_mask=torch.zeros(BATCH, 11, dtype=torch.long)),
    "position_ids has shape [3, 3, 11], which is not [batch, length, ...]": dict(
        position_ids=torch.arange(11).expand(3, BATCH, 11)
    ),
}  # fmt: skip


@pytest.mark.parametrize("reason", REASONS)
def test_each_reason_is_counted(reason: str) -> None:
    model = fresh_pair("llama").ours
    adaattn_hf.prepare(model)
    inputs = {"input_ids": tokens(), "attention_mask": padding("right"), **REASONS[reason]}
    with torch.no_grad(), suppress(RuntimeError) if "position_ids" in inputs else nullcontext():
        model(**inputs)  # which cannot take such positions itself; what counts is what the hook says
    assert adaattn_hf.unpad_calls(model) == {reason: 1}


@pytest.mark.parametrize("error", [KeyError("broken layer"), KeyboardInterrupt()], ids=repr)
def test_a_pass_that_ends_inside_the_model_leaves_nothing_open(error: BaseException) -> None:
    """At once where it is an error, an interrupted one behind the next pass."""
    model = adaattn_hf.prepare(fresh_pair("llama").ours)
    mask = padding("right")
    handle = model.model.layers[1].register_forward_pre_hook(Mock(side_effect=error))
    with pytest.raises(type(error)):
        model(tokens(), attention_mask=mask)
    handle.remove()
    assert hooks._frames.get() == () or isinstance(error, KeyboardInterrupt)
    with torch.no_grad():
        assert model.model(tokens(), attention_mask=mask).last_hidden_state.shape[:2] == mask.shape
    assert adaattn_hf.unpad_calls(model) == {UNPADDED: 2}
    assert hooks._frames.get() == ()


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_rows_are_not_packed_for_an_implementation_set_later(name: str) -> None:
    stock, ours = fresh_pair(name)
    adaattn_hf.prepare(ours).set_attn_implementation("sdpa")
    given = {"input_ids": tokens(), "attention_mask": padding("right")}
    with torch.no_grad():
        assert_same(stock(**given)[0], ours(**given)[0], given["attention_mask"])
        reason = "another attention implementation was set since the model was prepared"
        assert adaattn_hf.unpad_calls(ours) == {reason: 1}
        ours.set_attn_implementation("adaattn_sdpa")
        assert_same(stock(**given)[0], ours(**given)[0], given["attention_mask"])
    assert adaattn_hf.unpad_calls(ours) == {reason: 1, UNPADDED: 1}


def test_windows_of_a_plan_count_columns_between_tokens() -> None:
    ours, given = fresh_pair("llama").ours, {"input_ids": tokens(), "attention_mask": padding("holes")}
    adaattn_hf.load_plan(ours, plan_for(ours, Choice.of(Window(3)), lengths=(tokens().shape[1],)), unverified=True)
    with torch.no_grad():
        right = ours(**given)[0]
        assert_same(right, adaattn_hf.prepare(ours)(**given)[0], given["attention_mask"])


def test_threads_do_not_see_one_another() -> None:
    stock, ours = fresh_pair("bert")
    adaattn_hf.prepare(ours)

    @torch.no_grad()
    def work(side: str) -> Any:
        return [ours(tokens(), attention_mask=padding(side)).last_hidden_state for _ in range(20)][-1]

    with ThreadPoolExecutor() as pool:
        results = {side: pool.submit(work, side) for side in ("right", "holes")}
    for side, result in results.items():
        with torch.no_grad():
            assert_same(stock(tokens(), attention_mask=padding(side)).last_hidden_state, result.result(), padding(side))


def test_restore_takes_every_hook_away(tmp_path: Path) -> None:
    model = fresh_pair("llama").ours
    keys, before = set(model.state_dict()), hooks_of(model)
    assert adaattn_hf.prepare(model) is model
    assert hooks_of(model) > before
    assert set(model.state_dict()) == keys
    once = hooks_of(model)
    adaattn_hf.prepare(model)
    assert hooks_of(model) == once, "preparing twice is preparing once"
    assert adaattn_hf.restore(model) is model
    assert hooks_of(model) == before
    assert adaattn_hf.unpad_calls(model) == {}
    adaattn_hf.restore(model)
    with torch.no_grad():
        out = model(tokens(), attention_mask=padding("right"))
    assert type(out.past_key_values.layers[0]).__name__ == "DynamicLayer"


def test_a_prepared_model_is_saved_and_copied_like_any_other(tmp_path: Path) -> None:
    model = adaattn_hf.prepare(fresh_pair("llama").ours)
    mask = padding("right")
    model.save_pretrained(tmp_path)
    again = tf.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="adaattn")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        expected = model(tokens(), attention_mask=mask).logits
        assert_same(expected, again(tokens(), attention_mask=mask).logits, mask)
        assert_same(expected, twin(tokens(), attention_mask=mask).logits)
    assert adaattn_hf.unpad_calls(twin) == {UNPADDED: 1}
    adaattn_hf.restore(twin)
    assert hooks_of(twin) < hooks_of(model)
    assert adaattn_hf.unpad_calls(model) == {UNPADDED: 1}


@pytest.mark.parametrize("name", ["llama", "roberta"])
def test_a_prepared_model_is_pickled_like_any_other(name: str) -> None:
    model = adaattn_hf.prepare(fresh_pair(name).ours)
    again = pickle.loads(pickle.dumps(model))
    mask = padding("right")
    with torch.no_grad():
        assert_same(model(tokens(), attention_mask=mask)[0], again(tokens(), attention_mask=mask)[0])
    assert adaattn_hf.unpad_calls(again) == {UNPADDED: 1}


def test_a_part_that_was_prepared_alone_is_restored_with_the_whole() -> None:
    model = fresh_pair("llama").ours
    before = hooks_of(model)
    adaattn_hf.prepare(model.model)
    with torch.no_grad():
        model(tokens(), attention_mask=padding("right"))
    assert adaattn_hf.unpad_calls(model) == {UNPADDED: 1}
    adaattn_hf.restore(model)
    assert hooks_of(model) == before


def test_caches_grow_where_padding_stays() -> None:
    model = fresh_pair("llama").ours
    mask = padding("right")
    adaattn_hf.prepare(model, unpad=False)
    with torch.no_grad():
        out = model(tokens(), attention_mask=mask, use_cache=True)
    assert {type(layer) for layer in out.past_key_values.layers} == {CachedLayer}
    assert adaattn_hf.unpad_calls(model) == {}


def test_encoder_decoders_get_growing_caches() -> None:
    stock, ours = fresh_pair("bart")
    adaattn_hf.prepare(ours, unpad=False)
    how: dict[str, Any] = dict(num_beams=2, max_new_tokens=6, return_dict_in_generate=True)
    outs = [m.generate(tokens(), attention_mask=padding("right"), **how) for m in (stock, ours)]
    assert torch.equal(outs[0].sequences, outs[1].sequences)
    layers = outs[1].past_key_values.self_attention_cache.layers
    assert {type(layer).__name__ for layer in layers} == {"CachedLayer"}


@pytest.mark.parametrize("causal", [True, False])
def test_a_trainer_reaches_the_same_weights(causal: bool, tmp_path: Path) -> None:
    cls = tf.LlamaForCausalLM if causal else tf.BertForSequenceClassification
    stock, ours = build(cls, config_of("llama" if causal else "bert"))
    adaattn_hf.prepare(ours)
    rows: Any = [one if causal else {**one, "labels": place % 2} for place, one in enumerate(examples(12))]
    losses = []
    for name, model in (("stock", stock), ("ours", ours)):
        settings = arguments(tmp_path / name, max_steps=4, learning_rate=1e-3, gradient_accumulation_steps=2)
        trainer = tf.Trainer(model, settings, train_dataset=rows)
        trainer.train()
        losses.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert adaattn_hf.unpad_calls(ours)[UNPADDED] >= 6
