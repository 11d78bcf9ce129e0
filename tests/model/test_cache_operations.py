"""What is done to caches between calls, in every format, streaming or not; the two names by which models take one."""

import copy
import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

import adaattn_hf
from adaattn_hf.eval.runner import forward
from adaattn_hf.eval.timing import peak_bytes
from adaattn_hf.patches.cache.caches import AdaAttnCache
from adaattn_hf.patches.cache.formats import FORMATS
from adaattn_hf.patches.models.cache_keyword import CACHE_KEYWORDS, cache_in, cache_keyword, with_cache
from studies.cache_speed import held_bytes

from ..support.cached import ids, llama, run
from ..support.choices import make_choice
from ..support.models import config_of, fresh_pair, padding, tokens
from ..support.versions import HERE
from .test_streaming_cache import EXACT, NEAR, give, model_for


def saved(model: Any, cache: Any, directory: Path, mask: Tensor | None) -> Any:
    return adaattn_hf.load_cache(adaattn_hf.save_cache(cache, directory / "cache"), model)


def prefix(model: Any, cache: Any, directory: Path, mask: Tensor | None) -> Any:
    """Used again, after another text has followed it."""
    kept = copy.deepcopy(cache)
    run(model, ids(3, 200).flip(1), cache, 30, 1, mask=mask)
    return kept


def offloaded(model: Any, cache: Any, directory: Path, mask: Tensor | None) -> None:
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()


def cropped(model: Any, cache: Any, directory: Path, mask: Tensor | None) -> None:
    """Before a window is passed, as streaming heads ask for."""
    run(model, ids(3, 200).flip(1), cache, 1, 3, mask=mask)
    cache.crop(-4)


OPERATIONS: dict[str, tuple[Callable[..., Any], list[int]]] = {
    **{operation.__name__: (operation, [0, 1, 2]) for operation in (saved, prefix, offloaded, cropped)},
    "reordered": (lambda _, cache, *__: cache.reorder_cache(torch.tensor([2, 2, 0])), [2, 2, 0]),
    "split": (lambda _, cache, *__: cache.batch_select_indices(torch.tensor([1])), [1]),
    "repeated": (lambda _, cache, *__: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
}
"""What is done with a cache (one that is returned takes its place), and which rows it holds then."""


@pytest.mark.parametrize(("streaming", "padded"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("stored", FORMATS)
def test_what_follows_is_the_same(stored: str, streaming: bool, operation: str, padded: bool, tmp_path: Path) -> None:
    """Pieces of a prompt, single tokens, and rows that begin later than others."""
    model, tokens = model_for(stored), ids(3, 200)
    mask: Tensor | None = torch.ones_like(tokens) if padded else None
    if mask is not None:
        mask[2, :5] = 0
    before = (9,) if operation == "cropped" else (40, 1, 13)

    def read(rows: list[int]) -> Any:
        cache = AdaAttnCache(model, stored, streaming=streaming)
        run(model, tokens[rows], cache, *before, mask=None if mask is None else mask[rows])
        return cache

    def follow(cache: Any, rows: list[int]) -> Tensor:
        return run(model, tokens[rows], cache, 20, 1, 1, 33, mask=None if mask is None else mask[rows])

    cache, (work, rows) = read([0, 1, 2]), OPERATIONS[operation]
    cache = work(model, cache, tmp_path, mask) or cache
    assert cache.get_seq_length() == sum(before)
    torch.testing.assert_close(follow(cache, rows), follow(read(rows), rows), atol=NEAR, rtol=0)


@pytest.mark.parametrize(("stored", "streaming"), [("int8", False), ("k8v4", True)])
def test_the_peak_of_decode_steps_is_what_explain_says(stored: str, streaming: bool) -> None:
    """Within 5 %, of 12 rows, since the kernels' own buffers are half a megabyte whatever the cache."""
    model = llama(hidden_size=64, intermediate_size=64, num_key_value_heads=4, head_dim=64)
    if streaming:
        give(model, ((EXACT, EXACT, EXACT, make_choice("window", 256, 4)),) * 2, 2000)
    told = adaattn_hf.explain(model, cache=stored, streaming=streaming).cache
    cache = AdaAttnCache(model, stored, reserve=2000, streaming=streaming)
    run(model, ids(12, 2000), cache, *[165] * 12)
    steps, _ = peak_bytes(lambda: run(model, ids(12, 2000), cache, *[1] * 20), torch.device("cpu"))
    assert told is not None
    assert held_bytes(cache) + steps == pytest.approx(told.predict(12, 2000), rel=0.05)


RENAMED = HERE.release >= (5, 24)


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
