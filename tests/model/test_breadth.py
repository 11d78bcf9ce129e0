"""Families of every kind against stock eager attention: the mathematics that the three main families lack.

Softcap, learned sinks, position bias, sliding and chunked layers mixed, cross-attention, images, keys chosen by an
indexer, key and value heads of different sizes. The list is `breadth.yaml`.
"""

import copy
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from adaattn_hf import AdaAttnCache, UnsupportedModel, check, explain, prepare
from adaattn_hf.attention.listeners import listening
from adaattn_hf.patches.models.cache_keyword import with_cache

from ..support.families import LISTED, ROUTED, configured, models
from ..support.models import Pair, answers, build, padding, tokens
from ..support.recorder import Recorder


def outputs(pair: Pair, **inputs: Any) -> list[Tensor]:
    """Of both models; ours must have been asked, and only on the interface's own terms."""
    expected = answers(pair.stock, **inputs)
    with listening(Recorder()) as heard:
        actual = answers(pair.ours, **inputs)
    assert heard.calls, "no attention layer asked for our function"
    return [*expected, *actual]


def assert_near(expected: Tensor, actual: Tensor, valid: Tensor | None = None, rtol: float = 1e-5) -> None:
    assert torch.isfinite(actual).all()
    difference = (actual - expected).abs()
    if valid is not None:
        difference, expected = difference[valid.bool()], expected[valid.bool()]
    assert float(expected.abs().max()) > 1e-3, "an output of zeros compares equal to anything"
    assert float(difference.max()) <= rtol * float(expected.abs().max())


@pytest.mark.parametrize("family", LISTED["decoders"])
def test_decoder_equals_eager_in_prompt_and_decoding(family: str) -> None:
    pair = models(family, LISTED["decoders"][family], tf.AutoModelForCausalLM)
    ids = tokens()
    for side in ("none", "left", "right"):
        mask = padding(side)
        assert_near(*outputs(pair, input_ids=ids, attention_mask=mask), mask)
    left = padding("left")
    steps = []
    for model in pair:
        with torch.no_grad():
            state = model(input_ids=ids[:, :8], attention_mask=left[:, :8], use_cache=True)
            logits = []
            for end in (9, 11):  # one token, then two at once
                state = model(
                    input_ids=ids[:, (8 if end == 9 else 9) : end], attention_mask=left[:, :end],
                    past_key_values=state.past_key_values, use_cache=True,
                )  # fmt: skip
                logits.append(state.logits)
        steps.append(torch.cat(logits, dim=1))
    assert_near(*steps)


KEYS_THEMSELVES = ("diffllama", "doge", "jetmoe")  # these compute with what their cache hands to them
LATENTS = (
    "axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3", "sarvam_mla", "youtu"
)  # fmt: skip
"""Since Transformers caches what these make keys and values of, and not those."""
OWN_CACHE = ("minimax",)


def refuses_codes(model: Any) -> None:
    for door in (
        lambda: AdaAttnCache(model, "int8"),
        lambda: AdaAttnCache(model, "k8v4"),
        lambda: prepare(model, unpad=False, cache="int8"),
        lambda: explain(model, cache="int8"),
    ):
        with pytest.raises(ValueError, match=r'computes with its cached keys .*use cache="model"'):
            door()


@pytest.mark.parametrize("family", LATENTS)
def test_a_cache_of_latents_is_refused_as_codes_and_read_as_numbers(family: str) -> None:
    pair = models(family, {}, tf.AutoModelForCausalLM)
    ids = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    if not any(hasattr(module, "expand_kv") for module in pair.ours.modules()):
        pytest.skip(f"transformers {tf.__version__} caches keys and values of {family}")
    refuses_codes(pair.ours)
    logits = []
    with torch.no_grad():
        for model, cache in (
            (pair.ours, AdaAttnCache(pair.ours, "model")), (pair.stock, tf.DynamicCache(config=pair.stock.config))
        ):  # fmt: skip
            parts = [model(input_ids=p, **with_cache(model, cache)).logits for p in ids.split([9, 1, 2], 1)]
            logits.append(torch.cat(parts, dim=1))
    assert_near(logits[1], logits[0])


@pytest.mark.parametrize("family", ["mamba", "rwkv", "xlstm"])
def test_models_without_keys_are_told_so(family: str) -> None:
    model = models(family, {}, tf.AutoModelForCausalLM).ours
    for door in (lambda: AdaAttnCache(model, "int8"), lambda: prepare(model, unpad=False, cache="int8")):
        with pytest.raises(ValueError, match=r"cache: got 'int8' for .*(keys and values|LinearAttentionLayer)"):
            door()


@pytest.mark.parametrize("stored", ["model", "int8"])
@pytest.mark.parametrize("family", [name for name in LISTED["decoders"] if name not in OWN_CACHE])
def test_decoder_reads_a_cache_of_ours(family: str, stored: str) -> None:
    """Numbers as Transformers' own cache does, codes nearly so, or says what is served instead."""
    model = models(family, LISTED["decoders"][family], tf.AutoModelForCausalLM).ours
    ids = torch.randint(3, 64, (2, 40), generator=torch.Generator().manual_seed(1))

    def read(cache: Any) -> Tensor:
        with torch.no_grad():
            return torch.cat([model(input_ids=p, past_key_values=cache).logits for p in ids.split([30, 1, 1, 8], 1)], 1)

    if stored == "int8" and family in KEYS_THEMSELVES:
        refuses_codes(model)
        return
    ours, theirs = read(AdaAttnCache(model, stored)), read(tf.DynamicCache(config=model.config))
    difference = (ours - theirs).abs() / theirs.std()
    assert float(difference.max()) < 1e-5 if stored == "model" else 0 < float(difference.mean()) < 0.05


@pytest.mark.parametrize("family", OWN_CACHE)
def test_a_prepared_model_with_a_cache_of_its_own_makes_that(family: str) -> None:
    pair = models(family, LISTED["decoders"][family], tf.AutoModelForCausalLM)
    prepared = prepare(copy.deepcopy(pair.ours), unpad=False)
    assert_near(*answers(pair.stock, prepared, input_ids=tokens(), use_cache=True))


LINEAR = ("minimax",)  # its other layers carry state from one document to the next


@pytest.mark.parametrize("borders", ["cu_seq_lens and positions", "positions"])
@pytest.mark.parametrize("family", [name for name in LISTED["decoders"] if name not in LINEAR])
def test_packed_documents_do_not_see_one_another(family: str, borders: str) -> None:
    """Some models keep the borders from their attention, some make their masks without positions."""
    pair = models(family, LISTED["decoders"][family], tf.AutoModelForCausalLM)
    ids, border = tokens(batch=1), 4
    length = ids.shape[1]
    inputs: dict[str, Any] = dict(
        input_ids=ids, position_ids=torch.cat([torch.arange(border), torch.arange(length - border)])[None]
    )
    if borders == "positions":
        inputs["use_cache"] = False
    else:
        sums = torch.tensor([0, border, length], dtype=torch.int32)
        inputs |= dict(cu_seq_lens_q=sums, cu_seq_lens_k=sums, max_length_q=length, max_length_k=length)
    alone = [answers(pair.stock, input_ids=part)[0] for part in (ids[:, :border], ids[:, border:])]
    assert_near(torch.cat(alone, dim=1), *answers(pair.ours, **inputs))


@pytest.mark.parametrize(("kind", "family"), [(kind, one) for kind in ("encoders", "sparse") for one in LISTED[kind]])
def test_one_pass_equals_eager(kind: str, family: str) -> None:
    """Of encoders, and of models with an indexer, whose queries see the keys alone that it selects."""
    pair = models(family, LISTED[kind][family], tf.AutoModel if kind == "encoders" else tf.AutoModelForCausalLM)
    for side in ("none", "left", "right", "holes"):
        mask = padding(side)
        assert_near(*outputs(pair, input_ids=tokens(), attention_mask=mask), mask)


@pytest.mark.parametrize("family", LISTED["encoder-decoders"])
def test_encoder_decoder_equals_eager(family: str) -> None:
    pair = models(family, LISTED["encoder-decoders"][family], tf.AutoModelForSeq2SeqLM)
    target = torch.ones(3, 6, dtype=torch.long)
    target[0, 4:] = 0
    for side in ("none", "left", "right"):
        given: dict[str, Any] = dict(input_ids=tokens(), attention_mask=padding(side))
        given |= dict(decoder_input_ids=tokens()[:, :6], decoder_attention_mask=target)
        assert_near(*outputs(pair, **given), target)


@pytest.mark.parametrize("family", LISTED["vision"])
def test_vision_model_equals_eager(family: str) -> None:
    pair = models(family, LISTED["vision"][family], tf.AutoModel)
    assert_near(*outputs(pair, pixel_values=torch.randn(2, 3, 16, 16)))


def test_a_mask_of_selected_blocks_is_read_per_group_of_heads() -> None:
    from types import SimpleNamespace

    from adaattn_hf.attention.structure import MaskStructure
    from adaattn_hf.patches.mask.documents import with_selected_keys

    module: Any = SimpleNamespace(indexer=SimpleNamespace(block_size=3))
    blocks = torch.tensor([[[[0, -1], [1, 2]], [[2, 0], [-1, -1]]]])
    structure = with_selected_keys(module, MaskStructure(1, 2, 7), 4, {"block_indices": blocks})
    first = [[1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1]]
    second = [[1, 1, 1, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0, 0]]
    assert structure.visible().int().tolist() == [[first, first, second, second]]


@pytest.mark.parametrize(("family", "size"), [
    *(("gpt2", size) for size in (5, 7, 8, 13, 24, 33, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256)),
    ("bert", 13), ("bert", 64), ("llama", 24), ("llama", 128),
])  # fmt: skip
def test_any_head_size(family: str, size: int) -> None:
    """Of a causal model all sizes; with rotary embeddings and grouped heads, and in both directions, two of them."""
    changes = dict(hidden_size=2 * size, num_attention_heads=2, num_key_value_heads=1, head_dim=size)
    auto = tf.AutoModel if family == "bert" else tf.AutoModelForCausalLM
    pair = models(family, {**changes, "num_hidden_layers": 1}, auto)
    with torch.no_grad(), listening(Recorder()) as heard:
        pair.ours(input_ids=tokens())
    assert [kind.head_dim for _, kind, _ in heard.calls] == [size], "the family has another name for it"
    for side in ("none", "left"):
        mask = padding(side)
        assert_near(*outputs(pair, input_ids=tokens(), attention_mask=mask), mask)


def test_image_tokens_see_one_another_both_ways() -> None:
    config = tf.Gemma3Config(
        text_config=configured(
            "gemma3_text", dict(sliding_window=4, layer_types=["sliding_attention", "full_attention"])
        ).to_dict(),
        vision_config=configured("siglip_vision_model", {}).to_dict(),
        mm_tokens_per_image=4,
        image_token_id=63,
        boi_token_id=62,
        eoi_token_id=61,
    )
    pair = build(tf.Gemma3ForConditionalGeneration, config)
    ids = tokens(2, 14) % 60 + 3
    ids[0, 3:7] = ids[1, 6:10] = 63
    types = (ids == 63).long()
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    given: dict[str, Any] = dict(input_ids=ids, attention_mask=mask, token_type_ids=types)
    given["pixel_values"] = torch.randn(2, 3, 16, 16)
    expected, actual = outputs(pair, **given)
    assert_near(expected, actual, mask)
    without = outputs(pair, **{**given, "token_type_ids": torch.zeros_like(types)})[1]
    assert float((without - actual).abs()[mask.bool()].max()) > 1e-3, "image spans changed nothing"


def test_learned_sinks_take_part_in_the_softmax() -> None:
    pair = models("gpt_oss", LISTED["decoders"]["gpt_oss"], tf.AutoModelForCausalLM)
    before = outputs(pair, input_ids=tokens())[1]
    with torch.no_grad():
        for model in pair:
            for name, parameter in model.named_parameters():
                if name.endswith("sinks"):
                    parameter.fill_(3.0)
    expected, actual = outputs(pair, input_ids=tokens())
    assert_near(expected, actual)
    assert float((actual - before).abs().max()) > 1e-3


def test_rows_of_padding_stay_out_of_the_way_of_gemma3n() -> None:
    """It divides by the magnitude of each row: a row of zeros would make the gradient of the model NaN."""
    config = configured(
        "gemma3n_text",
        dict(
            num_hidden_layers=4, num_kv_shared_layers=2,
            layer_types=["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
            sliding_window=4, vocab_size_per_layer_input=64, hidden_size_per_layer_input=4, laurel_rank=4,
            activation_sparsity_pattern=[0.0] * 4,
        ),
    )  # fmt: skip
    model = tf.Gemma3nForCausalLM._from_config(config, attn_implementation="adaattn").train()
    ids, mask = tokens(), padding("right")
    ids = ids * mask  # the embedding of the padding token is zero
    model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert grads
    assert all(torch.isfinite(grad).all() for grad in grads)


UNROUTED = (
    "bloom", "mpt", "rembert", "xglm", "mpnet", "roformer", "bigbird_pegasus", "gptj", "falcon", "gpt_neo", "deberta",
    "deberta-v2",
)  # fmt: skip


@pytest.mark.parametrize("family", [family for family in UNROUTED if family not in ROUTED])
def test_check_refuses_what_takes_no_implementation_by_name(family: str) -> None:
    with pytest.raises(UnsupportedModel, match="attn_implementation='eager'") as refused:
        check(tf.AutoConfig.for_model(family))
    sentence = str(refused.value)
    assert sentence.count("\n") == 0
    assert type(tf.AutoConfig.for_model(family)).__name__ in sentence


@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "bert", "t5", "vit", "llava", "gemma3", "modernbert", "gpt_oss", *ROUTED]
)
def test_check_lets_routed_families_pass(family: str) -> None:
    check(tf.AutoConfig.for_model(family))


@pytest.mark.parametrize(("family", "how"), [
    *((family, "does not route its attention") for family in ("bloom", "rembert", "mpnet")),
    ("inkling2_text", "gives every token attention sinks of its own"),
    ("deepseek_v4", "extends the mask by scores of its own"),
])  # fmt: skip
def test_a_model_that_no_kernel_here_serves_raises_one_sentence(family: str, how: str) -> None:
    config = configured(family, dict(n_head=4, n_layer=2) if family == "bloom" else {})
    model = tf.AutoModel.from_config(config, attn_implementation="adaattn").eval()
    with pytest.raises(UnsupportedModel, match=how):
        model(input_ids=tokens(), attention_mask=padding("left"))
    with pytest.raises(UnsupportedModel, match=how):
        check(model)


def test_a_mask_that_is_added_to_foreign_scores_raises() -> None:
    model = tf.AutoModel.from_config(configured("bigbird_pegasus", {}), attn_implementation="adaattn").eval()
    model.encoder.set_attention_type("original_full")
    with pytest.raises(UnsupportedModel, match="adds the attention mask"):
        model(input_ids=tokens(), attention_mask=padding("left"), decoder_input_ids=tokens()[:, :4])


def test_a_model_that_never_asks_is_found_by_check_alone() -> None:
    model = tf.AutoModel.from_config(configured("deberta-v2", {}), attn_implementation="adaattn").eval()
    with torch.no_grad(), listening(Recorder()) as heard:
        model(input_ids=tokens())
    assert not heard.calls
    with pytest.raises(UnsupportedModel):
        check(model)


def test_a_model_without_attention_of_its_own_is_served() -> None:
    pair = models("dpr", {}, tf.AutoModel)
    check(pair.ours)
    with torch.no_grad():
        assert_near(*(model(input_ids=tokens(), attention_mask=padding("left")).pooler_output for model in pair))


def test_towers_with_another_implementation_are_not_refused() -> None:
    model = tf.AutoModel.from_config(configured("deberta-v2", {}), attn_implementation="eager")
    check(model)
