"""A model's cache by either name: `cache` since Transformers 5.24, `past_key_values` before."""

import inspect
import warnings
from typing import Any

import pytest
import torch
import transformers as tf
from packaging.version import Version

import adaattn_hf
from adaattn_hf.eval.scoring import forward
from adaattn_hf.patches.models.cache_keyword import CACHE_KEYWORDS, cache_in, cache_keyword, with_cache

from ..support.models import config_of, fresh_pair, padding, tokens

RENAMED = Version(tf.__version__) >= Version("5.24")


def test_the_name_is_that_of_this_version() -> None:
    own = cache_keyword(inspect.signature(tf.LlamaForCausalLM.forward))
    assert own == ("cache" if RENAMED else "past_key_values")
    assert cache_keyword(inspect.signature(tf.BertForQuestionAnswering.forward)) is None


def test_a_forward_without_a_cache_says_so() -> None:
    with pytest.raises(TypeError, match="BertForQuestionAnswering takes no cache, expected a parameter cache or"):
        with_cache(tf.BertForQuestionAnswering(config_of("bert")), tf.DynamicCache())


@pytest.mark.parametrize("keyword", [name for name in CACHE_KEYWORDS if RENAMED or name != "cache"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_prepared_model_fills_the_callers_cache_by_either_name(keyword: str, side: str) -> None:
    """Padding is removed, and what the cache holds is what an unprepared model leaves there."""
    model = fresh_pair("llama").ours
    kept: list[Any] = []
    for prepared in (False, True):
        if prepared:
            adaattn_hf.prepare(model)
        cache = tf.DynamicCache(config=model.config)
        with torch.no_grad():
            out = model(tokens(), attention_mask=padding(side), use_cache=True, **{keyword: cache})
        assert cache_in(out) is cache
        kept.append(cache)
    real = padding(side).bool()
    for before, after in zip(kept[0].layers, kept[1].layers, strict=True):
        for name in ("keys", "values"):
            one, other = (getattr(layer, name).transpose(1, 2)[real] for layer in (before, after))
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    assert adaattn_hf.unpad_calls(model) == {"unpadded": 1}


def test_nothing_of_ours_uses_a_name_that_this_version_deprecates() -> None:
    model = fresh_pair("llama").ours
    ids = tokens()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        adaattn_hf.explain(model)
        adaattn_hf.prepare(model, cache="int8")
        with torch.no_grad():
            model(ids, attention_mask=padding("left"), use_cache=True)
        model.generate(ids, attention_mask=padding("left"), max_new_tokens=3, do_sample=False)
        adaattn_hf.restore(model)
        forward(model, {"input_ids": ids[:1]}, cache="int8", piece=3)
