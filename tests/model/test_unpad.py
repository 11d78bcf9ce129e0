"""Whole models without padding against stock models with it: outputs, losses, gradients, generation."""

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from transformers import AutoModelForMultipleChoice, AutoModelForSequenceClassification, DynamicCache

import adaattn_hf
from adaattn_hf.patches.unpad.packing import PackedLayout

from ..support.families import configured, models
from ..support.models import (
    BATCH,
    BERT_HEADS,
    GPT2_HEADS,
    HIDDEN,
    LENGTH,
    LLAMA_HEADS,
    VOCABULARY,
    Pair,
    answers,
    assert_same,
    build,
    checkpointed,
    config_of,
    fresh_pair,
    main_output,
    padding,
    tokens,
)
from ..support.versions import needs_tracing
from .test_plugin_heads import assert_equal_in_training, inputs_of

UNPADDED = "unpadded"
LABEL_PAD = -100
OTHER_FAMILIES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "distilbert": ("distilbert", tf.DistilBertModel, {}),
    "electra": ("electra", tf.ElectraModel, {"embedding_size": 16}),
    "albert": ("albert", tf.AlbertModel, {"embedding_size": 16}),
    "xlm-roberta": ("xlm-roberta", tf.XLMRobertaModel, {}),
    "opt": ("opt", tf.OPTForCausalLM, {"ffn_dim": 48, "word_embed_proj_dim": HIDDEN}),
}
FAMILIES: tuple[str, ...] = (
    "gpt2", "llama", "bert-decoder", "mistral-window", "qwen2-hybrid", "gemma2-softcap", "gpt-oss-sinks",
)  # fmt: skip
FAMILIES += ("llama4-chunked", "deepseek-mla", "gpt-neox", "bert", "roberta", "modernbert-local")


def made(name: str) -> Pair:
    if name in OTHER_FAMILIES:
        kind, cls, changes = OTHER_FAMILIES[name]
        found = build(cls, configured(kind, changes))
    else:
        found = fresh_pair(name)
    adaattn_hf.prepare(found.ours)
    return found


def ids_of(model: Any, mask: Tensor) -> Tensor:
    """Tokens with the padding token at the padding, as a tokenizer gives them."""
    pad = getattr(model.config, "pad_token_id", None)
    return tokens().masked_fill(mask == 0, pad if pad is not None else 0)


def first_linear_rows(model: nn.Module) -> list[int]:
    seen: list[int] = []
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.LayerNorm)):
            module.register_forward_pre_hook(lambda _, args: seen.append(args[0][..., 0].numel()))
    return seen


def test_layout_goes_both_ways() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1], [1, 0, 1, 0]])
    layout = PackedLayout(mask)
    assert layout.lengths == (2, 0, 3, 2)
    assert layout.cu_seq_lens.tolist() == [0, 2, 2, 5, 7]
    assert not layout.contiguous
    assert layout.starts == (0, 4, 1, 0)
    assert PackedLayout(mask[1:2]).starts == (4,)
    x = torch.randn(4, 4, 5)
    packed = layout.pack(x)
    assert torch.equal(packed[0], x[mask.bool()])
    assert torch.equal(layout.pad(packed), x * mask[..., None])
    assert PackedLayout(mask[:1]).contiguous
    assert PackedLayout(torch.ones(2, 3)).full


@pytest.mark.parametrize("side", ["right", "left", "holes"])
@pytest.mark.parametrize("name", [*FAMILIES, *OTHER_FAMILIES])
def test_hidden_states_and_logits_are_those_of_the_stock_model(name: str, side: str) -> None:
    stock, ours = made(name)
    mask = padding(side)
    inputs = {"input_ids": ids_of(stock, mask), "attention_mask": mask}
    with torch.no_grad():
        expected = stock(**inputs, output_hidden_states=True)
        actual = ours(**inputs, output_hidden_states=True)
    assert_same(main_output(expected), main_output(actual), mask)
    for left, right in zip(expected.hidden_states, actual.hidden_states, strict=True):
        assert_same(left, right, mask)
    calls = adaattn_hf.unpad_calls(ours)
    if side == "holes" or (side == "left" and getattr(ours, "pooler", None) is not None):
        assert UNPADDED not in calls
        assert sum(calls.values()) == (name != "opt")  # whose head calls the decoder, not its base model, which counts
    else:
        assert calls == {UNPADDED: 1}
        assert main_output(actual)[mask == 0].abs().max() == 0
        assert actual.hidden_states[0][mask == 0].abs().max() == 0
    if getattr(expected, "pooler_output", None) is not None:
        # where a row begins with padding stock pools that, and what it holds there is chance
        assert_same(expected.pooler_output, actual.pooler_output, mask[:, 0])


@pytest.mark.parametrize("name", ["bert", "llama", "bert-decoder"])
def test_only_real_tokens_are_computed(name: str) -> None:
    """By all but a pooler, which reads the first token of each row from the padded form."""
    _, ours = made(name)
    mask = padding("right")
    rows = first_linear_rows(ours)
    with torch.no_grad():
        ours(tokens(), attention_mask=mask)
    assert set(rows[:-1] if name == "bert" else rows) == {int(mask.sum())}
    assert mask.sum() < BATCH * LENGTH


@pytest.mark.parametrize("name", ["bert", "roberta", "llama", "gpt2"])
def test_other_inputs_are_packed_with_the_tokens(name: str) -> None:
    stock, ours = made(name)
    mask = padding("right")
    ids = ids_of(stock, mask)
    positions = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(2))[None] + 3
    embeds = torch.randn(BATCH, LENGTH, HIDDEN)
    variants: list[dict[str, Any]] = [
        {"inputs_embeds": embeds},
        {"input_ids": ids, "position_ids": positions},
        {"input_ids": ids, "position_ids": positions.repeat(BATCH, 1)},
    ]
    if name in ("bert", "gpt2"):
        variants.append({"input_ids": ids, "token_type_ids": tokens(seed=4) % 2})
    for inputs in variants:
        expected, actual = answers(stock, ours, attention_mask=mask, **inputs)
        assert_same(expected, actual, mask)
    assert adaattn_hf.unpad_calls(ours) == {UNPADDED: len(variants)}


def test_tuples_come_out_padded() -> None:
    stock, ours = made("bert")
    mask = padding("right")
    with torch.no_grad():
        expected = stock(tokens(), attention_mask=mask, return_dict=False, output_hidden_states=True)
        actual = ours(tokens(), mask, return_dict=False, output_hidden_states=True)
    assert isinstance(actual, tuple)
    assert_same(expected[0], actual[0], mask)
    assert_same(expected[1], actual[1])
    for left, right in zip(expected[2], actual[2], strict=True):
        assert_same(left, right, mask)


@pytest.mark.parametrize("name", ["bert", "llama", "gpt2"])
def test_attention_weights_are_answered_in_the_padded_form(name: str) -> None:
    stock, ours = made(name)
    mask = padding("right")
    with torch.no_grad():
        expected = stock(tokens(), attention_mask=mask, output_attentions=True)
        actual = ours(tokens(), attention_mask=mask, output_attentions=True)
    rows = mask[:, None, :, None].expand_as(expected.attentions[0])
    for left, right in zip(expected.attentions, actual.attentions, strict=True):
        assert_same(left, right, rows)
    assert adaattn_hf.unpad_calls(ours) == {"output_attentions asks for what only the padded form has": 1}


def test_a_row_of_nothing_but_padding_is_zero_and_disturbs_nobody() -> None:
    stock, ours = made("llama")
    mask = padding("right")
    mask[1] = 0
    expected, actual = answers(stock, ours, input_ids=tokens(), attention_mask=mask)
    assert_same(expected, actual, mask)
    assert actual[1].abs().max() == 0
    assert adaattn_hf.unpad_calls(ours) == {UNPADDED: 1}


def test_counts_that_grow_while_they_are_read() -> None:
    _, ours = made("llama")
    # while somebody reads them one by one, another thread counts a call of another kind
    grow = {"items": lambda self: ((name, self.update({"other": 1}) or 1) for name in self)}
    ours.__dict__["_adaattn_prepared"][-1].calls = type("Calls", (Counter,), grow)({UNPADDED: 1})
    assert adaattn_hf.unpad_calls(ours) == {UNPADDED: 1}


MORE_HEADS = {
    tf.RobertaForMaskedLM: "roberta", tf.RobertaForSequenceClassification: "roberta",
    tf.DistilBertForSequenceClassification: "distilbert", tf.ElectraForTokenClassification: "electra",
    tf.ModernBertForMaskedLM: "modernbert",
}  # fmt: skip


def head_of(cls: Any) -> Pair:
    if cls is tf.ModernBertForMaskedLM:
        return build(cls, config_of("modernbert-local"))
    if cls in MORE_HEADS:
        return build(cls, configured(MORE_HEADS[cls], {}))
    family = "gpt2" if cls in GPT2_HEADS else "bert" if cls in BERT_HEADS else "llama"
    config = config_of(family)
    if cls is tf.BertLMHeadModel:
        config.is_decoder = True
    return build(cls, config)


@pytest.mark.parametrize("cls", [*BERT_HEADS, *GPT2_HEADS, *LLAMA_HEADS, *MORE_HEADS], ids=lambda c: c.__name__)
def test_every_head_has_the_stock_loss_and_gradients(cls: Any) -> None:
    stock, ours = head_of(cls)
    adaattn_hf.prepare(ours)
    inputs = inputs_of(cls)
    assert_equal_in_training(Pair(stock, ours), inputs, rtol=1e-5)
    outcome = UNPADDED
    if "start_positions" in inputs:
        outcome = "the loss of start_positions is over padding positions, too"
    if cls is tf.GPT2DoubleHeadsModel:
        outcome = "inputs are not [batch, length]"
    assert adaattn_hf.unpad_calls(ours) == {outcome: 1}


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_labels_at_padding_have_the_loss_of_the_padded_form(name: str) -> None:
    cls = tf.LlamaForCausalLM if name == "llama" else tf.BertForMaskedLM
    stock, ours = build(cls, config_of(name))
    adaattn_hf.prepare(ours)
    mask = padding("right")
    assert_same(*(m(tokens(), attention_mask=mask, labels=tokens(seed=9)).loss.detach() for m in (stock, ours)))
    assert adaattn_hf.unpad_calls(ours) == {"a label is scored at a padding position": 1}


def test_the_page_of_surprises_says_how_many_answers_at_padding_change() -> None:
    """A start that is chosen among all positions: at padding a prepared model's scores are its bias."""
    stock, ours = build(tf.BertForQuestionAnswering, config_of("bert"))
    adaattn_hf.prepare(ours)
    ids, mask = tokens(batch=100), torch.arange(LENGTH) < torch.arange(100)[:, None] % (LENGTH - 4) + 5
    expected, found = answers(stock, ours, input_ids=ids, attention_mask=mask.long())
    assert_same(expected, found, mask)
    assert torch.equal(found[~mask], ours.qa_outputs.bias[0].expand_as(found[~mask]))
    changed = int((expected.argmax(1) != found.argmax(1)).sum())
    among_real = [scores.masked_fill(~mask, -torch.inf).argmax(1) for scores in (expected, found)]
    assert torch.equal(*among_real)
    said = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    assert 0 < changed < 100
    assert f"{changed} of 100 answers" in " ".join(said.split()), changed


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(reentrant: bool) -> None:
    stock, ours = made("llama")
    mask = padding("right")
    labels = tokens().masked_fill(mask == 0, LABEL_PAD)
    ours.train()
    checkpointed(ours, reentrant)
    for model in (stock, ours):
        model(tokens(), attention_mask=mask, labels=labels, use_cache=False).loss.backward()
    for (_, left), (_, right) in zip(stock.named_parameters(), ours.named_parameters(), strict=True):
        assert_same(left.grad, right.grad)
    assert adaattn_hf.unpad_calls(ours) == {UNPADDED: 1}


def test_autocast_and_half_precision() -> None:
    stock, ours = made("bert")
    mask = padding("right")
    with torch.no_grad():
        exact = stock.double()(tokens(), attention_mask=mask).last_hidden_state.float()
        stock.float()
        with torch.autocast("cpu", torch.bfloat16):
            theirs = stock(tokens(), attention_mask=mask).last_hidden_state
            mine = ours(tokens(), attention_mask=mask).last_hidden_state
        assert mine.dtype == theirs.dtype
        half = copy.deepcopy(ours).bfloat16()
        low = half(tokens(), attention_mask=mask).last_hidden_state.float()
    real = mask.bool()
    bound = 2 * (theirs.float() - exact)[real].abs().max() + 0.02
    assert (mine.float() - exact)[real].abs().max() <= bound
    assert (low - exact)[real].abs().max() <= 2 * bound
    assert adaattn_hf.unpad_calls(half) == {UNPADDED: 2}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt2 in two", "mistral-window"])
def test_a_prompt_fills_the_cache_as_stock_does(name: str, side: str) -> None:
    stock, ours = made(name.removesuffix(" in two"))
    mask = padding(side)
    more = torch.cat([mask, torch.ones(BATCH, 1, dtype=mask.dtype)], dim=1)
    positions = (more.cumsum(1) - 1).clamp(min=0)
    results = []
    for model in (stock, ours):
        with torch.no_grad():
            given = tf.EncoderDecoderCache(DynamicCache(), DynamicCache()) if "two" in name else None
            where = dict(attention_mask=mask, position_ids=positions[:, :-1], past_key_values=given)
            first = model(tokens(), use_cache=True, **where)
            cache = first.past_key_values if given is None else given.self_attention_cache
            assert isinstance(cache, DynamicCache)
            assert given in (None, first.past_key_values)
            assert cache.get_seq_length() == LENGTH
            second = model(tokens(length=1), attention_mask=more, position_ids=positions[:, -1:], past_key_values=cache)
        results.append((first.logits, second.logits, [layer.keys for layer in cache.layers]))
    assert_same(results[0][0], results[1][0], mask)
    assert_same(results[0][1], results[1][1])
    assert [k.shape for k in results[0][2]] == [k.shape for k in results[1][2]]
    assert adaattn_hf.unpad_calls(ours) == {UNPADDED: 1, "one token per row": 1}


@pytest.mark.parametrize("flow", [{}, {"num_beams": 3}, {"cache_implementation": "static"}])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral-window", "gemma3-hybrid"])
def test_generate_gives_the_same_tokens(name: str, flow: dict[str, Any]) -> None:
    stock, ours = made(name)
    mask = padding("left")
    settings = {"max_new_tokens": 8, "pad_token_id": 0, "eos_token_id": None, "disable_compile": True, **flow}
    outs = [m.generate(tokens(), attention_mask=mask, return_dict_in_generate=True, **settings) for m in (stock, ours)]
    assert torch.equal(outs[0].sequences, outs[1].sequences)
    if "cache_implementation" not in flow:
        assert adaattn_hf.unpad_calls(ours)[UNPADDED] == 1
        assert {type(layer).__name__ for layer in outs[1].past_key_values.layers} == {"CachedLayer"}


def test_a_second_turn_runs_with_its_padding_and_is_counted() -> None:
    stock, ours = made("llama")
    mask = padding("left")
    longer = torch.cat([mask, torch.ones(BATCH, 3, dtype=mask.dtype)], dim=1)
    logits = []
    for model in (stock, ours):
        with torch.no_grad():
            cache = model(tokens(), attention_mask=mask, use_cache=True).past_key_values
            logits.append(model(tokens(length=3), attention_mask=longer, past_key_values=cache).logits)
    assert_same(*logits)
    assert adaattn_hf.unpad_calls(ours) == {UNPADDED: 1, "the cache holds tokens already": 1}


def test_no_cache_comes_out_where_none_was_asked_for() -> None:
    _, ours = made("llama")
    with torch.no_grad():
        out = ours(tokens(), attention_mask=padding("right"), use_cache=False)
    assert out.past_key_values is None


def test_few_logits_are_kept_from_the_padded_form() -> None:
    stock, ours = made("llama")
    mask = padding("left")
    expected, actual = answers(stock, ours, input_ids=tokens(), attention_mask=mask, logits_to_keep=2)
    assert actual.shape == (BATCH, 2, VOCABULARY)
    assert_same(expected, actual)
    assert adaattn_hf.unpad_calls(ours) == {UNPADDED: 1}
    expected, actual = answers(stock, ours, input_ids=tokens(), attention_mask=mask.flip(1), logits_to_keep=1)
    assert_same(expected, actual)
    assert adaattn_hf.unpad_calls(ours)["all logits to keep of a row are at padding"] == 1


@pytest.mark.parametrize("family", ["llama", "gpt2", "electra"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_heads_that_pool_at_hidden_places_read_what_an_unprepared_model_has_there(family: str, side: str) -> None:
    """Transformers pools where the last id is not that of padding, or at the end of embeddings; Electra may average."""
    mask, encoder = padding(side), family == "electra"
    auto = AutoModelForMultipleChoice if encoder else AutoModelForSequenceClassification
    changes: dict[str, Any] = {"pad_token_id": 0, "num_labels": 3, **({"summary_type": "mean"} if encoder else {})}
    stock, ours = models(family, changes, auto)
    adaattn_hf.prepare(ours)
    for ids in (tokens(), tokens() * mask):
        calls: list[dict[str, Tensor]] = [{"input_ids": ids, "attention_mask": mask}]
        if encoder:
            calls = [{name: given[:, None] for name, given in calls[0].items()}]
        else:
            calls += [{"inputs_embeds": stock.get_input_embeddings()(ids).detach(), "attention_mask": mask}]
        for call in calls:
            with torch.no_grad():
                assert_same(stock(**call).logits, ours(**call).logits)
    packed = {"llama": 1, "gpt2": 1, "electra": 0}[family] if side == "right" else 4 if not encoder else 0
    assert adaattn_hf.unpad_calls(ours).get(UNPADDED, 0) == packed


@needs_tracing
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_compiled_model_stands_aside_without_breaking_the_graph(name: str) -> None:
    stock, ours = made(name)
    mask = padding("right")
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    expected, actual = answers(stock, compiled, input_ids=tokens(), attention_mask=mask, use_cache=False)
    assert_same(expected, actual, mask)
    assert adaattn_hf.unpad_calls(ours) == {}
