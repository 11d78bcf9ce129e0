"""Memory on a CUDA device stays what it was after the first calls of a shape."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from adaattn_hf.backends.select import attend

from .test_cuda import make, pair, structures

pytestmark = pytest.mark.gpu

CALLS = 100


def grown(call: Callable[[], Any]) -> dict[str, int]:
    """By how much a hundred calls behind the first few raise what torch's allocator counts."""

    def counts() -> dict[str, int]:
        gc.collect()
        torch.cuda.synchronize()
        found = torch.cuda.memory_stats()
        return {name: found[name] for name in ("num_alloc_retries", "reserved_bytes.all.current")}

    for _ in range(5):
        call()
    before = counts()
    for _ in range(CALLS):
        call()
    return {name: count - before[name] for name, count in counts().items()}


FLAT = {"num_alloc_retries": 0, "reserved_bytes.all.current": 0}


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "gradients"])
@pytest.mark.parametrize(
    "name", ["full", "causal", "decode", "padded decode", "window", "left padding", "documents", "holes"]
)
def test_calls_of_a_shape_reserve_nothing_more(name: str, grad: bool) -> None:
    """Each with a structure of its own, as in each pass of a model."""
    structure = structures()[name]
    asked = make(structure, torch.bfloat16, 64)

    def call() -> None:
        given = (tensor.detach().requires_grad_(grad) for tensor in (asked.query, asked.key, asked.value))
        request = type(asked)(*given, structure.with_changes(), scaling=asked.scaling)
        out = attend(request).out
        if grad:
            out.sum().backward()

    assert grown(call) == FLAT


def test_what_grows_is_found() -> None:
    kept: list[torch.Tensor] = []
    assert grown(lambda: kept.append(torch.empty(1 << 20, device="cuda"))) != FLAT


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_steps_of_training_reserve_nothing_more(name: str) -> None:
    model = pair(name)[1]
    ids = torch.randint(3, 64, (3, 50), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, :20] = 0

    def call() -> None:
        model.zero_grad()
        model(ids, attention_mask=mask, labels=ids).loss.backward()

    assert grown(call) == FLAT


@pytest.mark.parametrize("stored", ["model", "int8"])
def test_generations_reserve_nothing_more(stored: str) -> None:
    from adaattn_hf import AdaAttnCache

    model = pair("llama")[1]
    ids = torch.randint(3, 64, (2, 30), device="cuda")

    def call() -> None:
        with torch.no_grad():
            cache = AdaAttnCache(model, stored)
            model(ids, past_key_values=cache)
            model(ids[:, :1], past_key_values=cache)

    assert grown(call) == FLAT
