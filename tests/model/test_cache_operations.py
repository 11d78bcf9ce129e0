"""What is done to caches between calls, in every format, streaming or not: what comes next does not notice."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import adaattn_hf
from adaattn_hf.eval.timing import peak_bytes
from adaattn_hf.patches.cache.caches import CACHES, AdaAttnCache
from studies.cache_speed import held_bytes

from ..support.cached import ids, llama, run
from ..support.choices import make_choice
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
@pytest.mark.parametrize("stored", CACHES)
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
