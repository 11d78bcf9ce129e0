"""Places under a plan count from a sequence's first token, though layers that slide hold the last keys alone."""

from typing import Any

import pytest
import torch
import transformers as tf

import adaattn_hf
from adaattn_hf.patches.plans.attach import load_plan
from adaattn_hf.plans.choices import Choice, Window

from ..support.cached import run
from ..support.models import VOCABULARY, build, tokens
from ..support.plans import plan_for
from .test_batching import one_by_one, together

SMALL: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
    num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=None, sliding_window=12,
)  # fmt: skip
NONE: dict[str, Any] = {}
SLIDING = {"layer_types": ["sliding_attention"] * 2}
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("phi3", "mistral", "starcoder2"), NONE),
    **dict.fromkeys(("ministral", "gemma2", "gemma3_text", "cohere2", "olmo3"), SLIDING),
    "gpt_oss": {**SLIDING, "num_local_experts": 2, "num_experts_per_tok": 1},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 0},
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"], "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8, "global_head_dim": 8, "num_kv_shared_layers": 0,
    },
    "llama4_text": {
        "attention_chunk_size": 12, "layer_types": ["chunked_attention"] * 2, "intermediate_size_mlp": 48,
        "num_local_experts": 2,
    },
}  # fmt: skip
LIMIT, LENGTH = 30, 60
CUTS = {"steps": [8, *[1] * 52], "pieces": [7] * 8 + [4], "chunks": [25, 25, 10], "both": [17, 30, 1, 12]}


def planned(family: str) -> Any:
    config = tf.AutoConfig.for_model(family, **SMALL, **FAMILIES[family])
    _, ours = build(tf.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)
    load_plan(ours, plan_for(ours, Choice.of(Window(4, sinks=1)), layers=(0,), lengths=(LIMIT,)), unverified=True)
    return ours


@pytest.mark.parametrize("family", FAMILIES)
def test_one_pass_steps_and_pieces_are_exact_from_the_same_row_on(family: str) -> None:
    model = planned(family)
    ids, mask = tokens(3, LENGTH), torch.ones(3, LENGTH, dtype=torch.long)
    mask[0, :6] = mask[1, :27] = 0
    whole, padded = (run(model, ids, None, LENGTH, mask=given) for given in (None, mask))
    caches: dict[str, Any] = {
        "dynamic": tf.DynamicCache, "growing": adaattn_hf.GrowingCache,
        "static": lambda config: tf.StaticCache(config=config, max_cache_len=LENGTH),
    }  # fmt: skip
    for made in caches.values():
        for cuts in CUTS.values():
            torch.testing.assert_close(run(model, ids, made(config=model.config), *cuts), whole)
            found = run(model, ids, made(config=model.config), *cuts, mask=mask)
            torch.testing.assert_close(found[mask.bool()], padded[mask.bool()])
    adaattn_hf.remove_plan(model)
    exact = run(model, ids, None, LENGTH)
    assert not torch.allclose(exact[:, 12:LIMIT], whole[:, 12:LIMIT], atol=1e-3), "the plan changed nothing"


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_generate_in_chunks_and_continuous_batching_agree_with_one_pass(family: str) -> None:
    model = planned(family)
    asked = {"max_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    for chunked in ({}, {"prefill_chunk_size": 7}):
        out = model.generate(tokens(1, 20), **asked, **chunked)
        whole = run(model, out.sequences, None, 50)
        torch.testing.assert_close(torch.stack(out.logits, 1), whole[:, 19:-1])
    prompts = [tokens(1, length, seed=length)[0].tolist() for length in (4, 27, 33, 50)]
    with adaattn_hf.continuous_batching(model):
        found = together(model, prompts)
    assert found == one_by_one(model, prompts)


@pytest.mark.parametrize("stored", ["int8", "k8v4"])
def test_rows_beyond_the_lengths_are_those_of_no_plan_over_codes(stored: str) -> None:
    """A plan of the last layer leaves all keys and values as they are."""
    _, model = build(tf.MistralForCausalLM, tf.MistralConfig(**{**SMALL, "head_dim": 32}))
    load_plan(model, plan_for(model, Choice.of(Window(4, sinks=1)), layers=(1,), lengths=(LIMIT,)), unverified=True)
    ids, found = tokens(2, LENGTH), []
    for _ in range(2):
        found.append([run(model, ids, adaattn_hf.AdaAttnCache(model, stored), *cuts) for cuts in CUTS.values()])
        adaattn_hf.remove_plan(model)
    for plan, exact in zip(*found, strict=True):
        torch.testing.assert_close(plan[:, LIMIT:], exact[:, LIMIT:])
        assert not torch.allclose(plan[:, :LIMIT], exact[:, :LIMIT], atol=1e-3)


def test_a_compiled_step_of_a_sliding_static_cache_counts_from_the_first_token() -> None:
    model = planned("mistral")
    ids, cache = tokens(1, 40), tf.StaticCache(config=model.config, max_cache_len=40)
    whole, step = run(model, ids, None, 40), torch.compile(model, backend="eager", fullgraph=True)
    run(model, ids, cache, 8)
    with torch.no_grad():
        found = [step(ids[:, at : at + 1], past_key_values=cache).logits for at in range(8, 40)]
    torch.testing.assert_close(torch.cat(found, 1), whole[:, 8:])


def test_rows_of_few_and_of_many_tokens_share_a_call_past_the_lengths() -> None:
    model = planned("mistral")
    ids, mask = tokens(2, LENGTH), torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :-10] = 0
    with torch.no_grad():
        found = model(ids, attention_mask=mask).logits[0, -10:]
        torch.testing.assert_close(found, model(ids[:1, -10:]).logits[0], atol=1e-5, rtol=1e-4)
