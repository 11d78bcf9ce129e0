"""The contract of a cache: how long its views are valid, that copies are copies, that it holds what a user puts in."""

import copy
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import adaattn_hf
from adaattn_hf.patches.cache.store import Store
from adaattn_hf.patches.models.cache_keyword import with_cache

from ..support import cached
from ..support.versions import since


def llama(implementation: str = "adaattn", seed: int = 3) -> Any:
    return _ready(cached.llama(implementation, seed, num_hidden_layers=3))


def mistral(implementation: str = "adaattn") -> Any:
    return _ready(cached.mistral(implementation, 3, num_hidden_layers=3, sliding_window=6))


def _ready(model: Any) -> Any:
    return adaattn_hf.prepare(model, unpad=False) if model.config._attn_implementation == "adaattn" else model


MODELS = {"llama": llama, "mistral": mistral}
RECORDING = "a stock layer that records its past returns more keys than its mask has columns, if no crop comes between"


def ids(count: int, seed: int, batch: int = 2) -> Tensor:
    return torch.randint(3, cached.VOCAB, (batch, count), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def step(model: Any, tokens: Tensor, cache: Any) -> Tensor:
    logits: Tensor = model(tokens, **with_cache(model, cache)).logits
    return logits


def users(model: Any) -> DynamicCache:
    """A cache that the user made, of Transformers' own kind."""
    return DynamicCache(config=model.config)


def held(cache: Any) -> list[tuple[Tensor, Tensor]]:
    return [(layer.keys, layer.values) for layer in cache.layers]


def numbers(kept: Any) -> list[Tensor]:
    """What keys and values, or the codes that stand for them, say now."""
    found = []
    for pair in kept:
        for name, one in zip(("keys", "values"), pair, strict=True):
            read = one if isinstance(one, Tensor) else getattr(one.record, name)(one.codes, torch.float32)
            found.append(read.clone())
    return found


CHANGES: dict[str, Callable[[Any], Any]] = {
    "cropped": lambda cache: cache.crop(-4),
    "cropped_twice": lambda cache: (cache.crop(-1), cache.crop(-3)),
    "reordered": lambda cache: cache.reorder_cache(torch.tensor([1, 1])),
    "selected": lambda cache: cache.batch_select_indices(torch.tensor([1, 0])),
    "repeated": lambda cache: (cache.batch_repeat_interleave(2), cache.batch_select_indices(torch.tensor([3, 0]))),
    "emptied": lambda cache: cache.reset(),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stored", ["user's", "model"])
def test_views_of_numbers_outlive_the_tokens_that_follow(stored: str, name: str) -> None:
    model = MODELS[name]()
    cache = users(model) if stored == "user's" else adaattn_hf.AdaAttnCache(model, stored)
    kept: list[Tensor] = []
    for count in (1, 20, 1, 1, 4, 90, 1):
        step(model, ids(count, count), cache)
        kept += [tensor for pair in held(cache) for tensor in pair]
        before = [tensor.clone() for tensor in kept]
    step(model, ids(70, 3), cache)
    assert all(torch.equal(a, b) for a, b in zip(before, kept, strict=True))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("stored", ["user's", "model", "int8", "k8v4"])
def test_a_copy_that_was_taken_in_time_stays_and_goes_on(stored: str, change: str) -> None:
    """What a view is good for ends with a change; a copy of the cache knows nothing of what follows."""
    model = llama()
    cache = users(model) if stored == "user's" else adaattn_hf.AdaAttnCache(model, stored)
    for tokens in (ids(20, 1), ids(1, 2), ids(4, 3)):
        step(model, tokens, cache)
    copied, other = copy.deepcopy(cache), copy.deepcopy(cache)
    before = numbers(held(copied))
    CHANGES[change](cache)
    for tokens in (ids(7, 4), ids(1, 5), ids(90, 6)):
        step(model, tokens, cache)
    assert all(torch.equal(a, b) for a, b in zip(before, numbers(held(copied)), strict=True))
    assert torch.equal(step(model, ids(3, 7), copied), step(model, ids(3, 7), other))


@pytest.mark.parametrize("name", ["llama", pytest.param("mistral", marks=since("5.18", RECORDING))])
def test_branches_of_a_tree_have_the_logits_of_the_stock_cache(name: str) -> None:
    """Two texts behind one prefix, the second after the first was taken back; then the first, from what was kept."""

    def grow(model: Any) -> list[Tensor]:
        cache = users(model)
        cache.activate_past_recording()
        step(model, ids(12, 1), cache)
        seen = [step(model, ids(4, 2), cache)]
        first = [(keys.clone(), values.clone()) for keys, values in held(cache)]
        cache.crop(-4)
        seen += [step(model, ids(4, 3), cache), step(model, ids(1, 4), cache)]
        again = DynamicCache(first) if name == "llama" else copy.deepcopy(cache)
        return [*seen, step(model, ids(2, 5), again), step(model, ids(2, 5), cache)]

    MODEL = MODELS[name]
    for ours, stock in zip(grow(MODEL()), grow(MODEL("sdpa")), strict=True):
        torch.testing.assert_close(ours, stock, atol=1e-5, rtol=0)


def fork_by_pickle(cache: Any) -> Any:
    return pickle.loads(pickle.dumps(cache))


def fork_by_layers(cache: Any) -> Any:
    branch = copy.copy(cache)
    branch.layers = [copy.copy(layer) for layer in cache.layers]
    return branch


@pytest.mark.parametrize("fork", [copy.deepcopy, fork_by_pickle, fork_by_layers])
@pytest.mark.parametrize("name", MODELS)
def test_a_fork_goes_its_own_way(name: str, fork: Callable[[Any], Any]) -> None:
    def grow(model: Any) -> list[Tensor]:
        cache = users(model)
        step(model, ids(12, 1), cache)
        branch = fork(cache)
        seen = []
        for number in range(3):
            seen += [step(model, ids(2, number), cache), step(model, ids(3, 9 + number), branch)]
        if name == "llama":
            branch.crop(-2)
            seen += [step(model, ids(2, 20), branch), step(model, ids(2, 21), cache)]
        return seen

    model = MODELS[name]
    for ours, stock in zip(grow(model()), grow(model("sdpa")), strict=True):
        torch.testing.assert_close(ours, stock, atol=1e-5, rtol=0)


@pytest.mark.parametrize("stored", ["int8", "k8v4"])
def test_a_fork_of_codes_goes_its_own_way(stored: str) -> None:
    model = llama()
    cache = adaattn_hf.AdaAttnCache(model, stored)
    step(model, ids(20, 1), cache)
    branch, other = fork_by_layers(cache), copy.deepcopy(cache)
    step(model, ids(5, 2), cache)
    assert torch.equal(step(model, ids(3, 3), branch), step(model, ids(3, 3), other))


def test_tokens_that_a_user_chose_are_the_ones_that_are_read() -> None:
    """Methods that drop tokens assign to a layer's keys and values, as those of stock caches may be."""

    def prune(model: Any) -> list[Tensor]:
        cache: Any = users(model)
        step(model, ids(12, 1), cache)
        chosen = torch.tensor([0, 1, 5, 6, 9, 11])
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[:, :, chosen], layer.values[:, :, chosen]
        seen = [step(model, ids(2, 2), cache), step(model, ids(1, 3), cache)]
        cache.layers[1].values = cache.layers[1].values * 2
        seen.append(step(model, ids(1, 4), cache))
        cache.crop(-1)
        cache.reorder_cache(torch.tensor([1, 0]))
        return [*seen, step(model, ids(1, 5), cache)]

    for ours, stock in zip(prune(llama()), prune(llama("sdpa")), strict=True):
        torch.testing.assert_close(ours, stock, atol=1e-5, rtol=0)


FLOWS: dict[str, dict[str, Any]] = {
    "greedy": {}, "beams": {"num_beams": 3}, "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "drafts": {"assistant_model": None},
}  # fmt: skip


@pytest.mark.parametrize("flow", FLOWS)
def test_generation_writes_in_place(flow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beams that move and drafts that are taken back cost no copy of the past: no past moves to another room."""
    model, moved = llama(), list[int]()
    how = {**FLOWS[flow], **({"assistant_model": llama(seed=4)} if flow == "drafts" else {})}
    move = Store._move

    def counted(self: Store, views: Iterable[Tensor], *args: Any) -> None:
        views = list(views)
        moved.extend(view.shape[2] for view in views if view.shape[2])
        move(self, views, *args)

    monkeypatch.setattr(Store, "_move", counted)
    prompt = ids(9, 1, batch=1).repeat(1, 2)
    settings: dict[str, Any] = dict(max_new_tokens=30, do_sample=False, pad_token_id=0, eos_token_id=None)
    out = model.generate(prompt, **settings, **how)
    assert moved == []
    model.generate(prompt, **{**settings, "max_new_tokens": 80}, **how)
    assert moved, "a longer text needs more room"
    stock = llama("sdpa")
    if flow == "drafts":
        how["assistant_model"] = llama("sdpa", seed=4)
    assert torch.equal(out, stock.generate(prompt, **settings, **how))


@pytest.mark.parametrize("stored", ["user's", "model", "int8"])
def test_layers_of_unequal_lengths_are_read_by_one_query_as_by_stock(stored: str) -> None:
    """As budgets per layer leave them: all keys of each layer, which needs no mask."""
    lengths, mask = (12, 7, 4), torch.ones(2, 14, dtype=torch.long)

    def read(model: Any, cache: Any) -> Tensor:
        step(model, ids(12, 1), cache)
        for layer, length in zip(cache.layers, lengths, strict=True):
            layer.crop(length - 12)
        one = step(model, ids(1, 2), cache)
        with torch.no_grad():
            return torch.cat([one, model(ids(1, 3), attention_mask=mask, **with_cache(model, cache)).logits], dim=1)

    ours, stock = llama(), llama("sdpa")
    cache = users(ours) if stored == "user's" else adaattn_hf.AdaAttnCache(ours, stored)
    expected = read(stock, users(stock))
    near = 0.02 * float(expected.std()) if stored == "int8" else 1e-5
    torch.testing.assert_close(read(ours, cache), expected, atol=near, rtol=0)


@pytest.mark.parametrize("case", ["several queries", "padding"])
def test_layers_of_unequal_lengths_are_refused_where_stock_has_no_answer(case: str) -> None:
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[0, :3] = 0
    for model, error in ((llama(), ValueError), (llama("sdpa"), RuntimeError)):
        cache: Any = users(model)
        step(model, ids(12, 1), cache)
        cache.layers[1].crop(-5)
        with pytest.raises(error) as caught, torch.no_grad():
            model(
                ids(3 if case == "several queries" else 1, 2),
                attention_mask=mask if case == "padding" else None,
                **with_cache(model, cache),
            )
        assert error is RuntimeError or "unequal numbers of tokens" in str(caught.value)
