"""The growing cache against Transformers' dynamic cache: same values, same tokens, storage that stays."""

import copy
import itertools
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, MistralConfig

from adaattn_hf.patches.cache.caches import GrowingCache, convert_layers
from adaattn_hf.patches.cache.layers import CachedLayer
from adaattn_hf.patches.cache.store import Room, Store

from ..support.cached import MODELS, SIZES, llama
from ..support.operators import Largest

WINDOW = 5


def sliding_config() -> MistralConfig:
    return MistralConfig(**SIZES, sliding_window=WINDOW)


def tokens(batch: int, count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 2, count, 8), torch.randn(batch, 2, count, 6)


def test_a_store_moves_rarely_and_never_where_its_room_was_reserved() -> None:
    for room, most in ((Room(growth=1.25), 25), (Room(reserve=3000), 0)):
        store = Store({"keys": torch.empty(2, 3, room.reserve, 4)}, room)
        expected, moves = [], 0
        for _ in range(3000):
            token = torch.randn(2, 3, 1, 4)
            before = store.rooms["keys"].data_ptr()
            store.extend(1)[0][:, :, -1:] = token
            moves += store.rooms["keys"].data_ptr() != before
            expected.append(token)
        assert torch.equal(store.views()[0], torch.cat(expected, dim=2))
        assert moves <= most  # log(3000 / 64) / log(1.25), and one for each of the first blocks
        assert store.capacity <= 1.25 * 3000 + 64


class AgainstDynamicCache(RuleBasedStateMachine):
    """Any order of calls on a full and a sliding layer leaves both caches with the same keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.no_grad = torch.no_grad()
        self.no_grad.__enter__()
        self.batch = 2
        self.kept: list[tuple[Tensor, Tensor]] = []

    def teardown(self) -> None:
        self.no_grad.__exit__(None, None, None)

    @initialize(sliding=st.booleans(), reserve=st.sampled_from([0, 3, 400]), recording=st.booleans())
    def start(self, sliding: bool, reserve: int, recording: bool) -> None:
        config = self.config = sliding_config() if sliding else LlamaConfig(**SIZES)
        self.sliding, self.recording = sliding, recording and sliding
        self.stock, self.ours = (DynamicCache(config=config), GrowingCache(config=config, reserve=reserve, growth=1.3))
        if self.recording:
            self.stock.activate_past_recording()
            self.ours.activate_past_recording()

    def both(self) -> tuple[DynamicCache, GrowingCache]:
        return self.stock, self.ours

    @rule(count=st.sampled_from([1, 1, 1, 2, 7, 70]), seed=st.integers(0, 1000))
    def update(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for layer in range(2):
            keys = torch.randn(self.batch, 2, count, 8, generator=generator)
            values = torch.randn(self.batch, 2, count, 6, generator=generator)
            sizes = [cache.get_mask_sizes(count, layer) for cache in self.both()]
            stock, ours = (cache.update(keys, values, layer) for cache in self.both())
            assert sizes[0] == sizes[1]
            # what the mask is told; up to Transformers 5.17 a recording stock layer returned more than that
            length = sizes[0][0]
            assert ours[0].shape[2] == ours[1].shape[2] == length
            assert torch.equal(stock[0][:, :, -length:], ours[0])
            assert torch.equal(stock[1][:, :, -length:], ours[1])

    @precondition(lambda self: self.stock.get_seq_length() > 0)
    @rule(share=st.floats(0, 1))
    def crop(self, share: float) -> None:
        length = self.stock.get_seq_length()
        if self.sliding and length >= WINDOW:
            if not self.recording:
                return
            # what can be taken back is what has been kept beyond the window
            length = max(0, self.stock.layers[0].keys.shape[2] - WINDOW + 1)
        count = int(share * length)
        self.stock.crop(-count)
        self.ours.crop(torch.tensor(-count))  # as assisted decoding of Transformers 5.17 counts
        self.kept = []

    @precondition(lambda self: self.stock.get_seq_length() > 0)
    @rule(seed=st.integers(0, 1000))
    def reorder(self, seed: int) -> None:
        rows = torch.randint(self.batch, (self.batch,), generator=torch.Generator().manual_seed(seed))
        for cache in self.both():
            cache.reorder_cache(rows)
        self.kept = []

    @precondition(lambda self: self.stock.get_seq_length() > 0 and self.batch <= 4)
    @rule(times=st.integers(1, 3))
    def repeat(self, times: int) -> None:
        for cache in self.both():
            cache.batch_repeat_interleave(times)
        self.batch *= times
        self.kept = []

    @precondition(lambda self: self.stock.get_seq_length() > 0)
    @rule(data=st.data())
    def select(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.integers(-self.batch, self.batch - 1), min_size=1, max_size=4))
        for cache in self.both():
            cache.batch_select_indices(torch.tensor(rows))
        self.batch = len(rows)
        self.kept = []

    @precondition(lambda self: self.stock.get_seq_length() > 0)
    @rule()
    def copy(self) -> None:
        self.stock, self.ours = copy.deepcopy(self.stock), copy.deepcopy(self.ours)

    @precondition(lambda self: self.stock.get_seq_length() > 0)
    @rule()
    def reset(self) -> None:
        self.ours.reset()
        # a new one, because up to Transformers 5.17 a stock layer keeps its length
        self.stock = DynamicCache(config=self.config)
        if self.recording:
            self.stock.activate_past_recording()
        self.batch = 2

    @precondition(lambda self: self.stock.get_seq_length() > 0)
    @rule(first=st.integers(0, 3))
    def hold(self, first: int) -> None:
        """Views, which stay what they are through updates and copies, until something else is done to the cache."""
        for layer in self.ours.layers:
            mine = (layer.keys[:, :, first:], layer.values)
            self.kept += [(tensor, tensor.clone()) for tensor in mine]

    @precondition(lambda self: not self.sliding and self.stock.get_seq_length() > 1)
    @rule(every=st.integers(2, 3))
    def prune(self, every: int) -> None:
        for cache in self.both():
            for layer in cache.layers:
                layer.keys, layer.values = layer.keys[:, :, ::every], layer.values[:, :, ::every] + 1

    @invariant()
    def untouched(self) -> None:
        assert all(torch.equal(tensor, was) for tensor, was in self.kept)

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "stock"):
            return
        assert self.stock.get_seq_length() == self.ours.get_seq_length()
        assert isinstance(self.ours.get_seq_length(), int)
        for stock, ours in zip(self.stock, self.ours, strict=True):
            for left, right in zip(stock, ours, strict=True):
                if left is None or left.numel() == 0:
                    assert right is None or right.numel() == 0
                else:
                    assert torch.equal(left, right)


TestAgainstDynamicCache = AgainstDynamicCache.TestCase
TestAgainstDynamicCache.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)


def test_gradients_flow_as_in_the_stock_cache() -> None:
    keys = [torch.randn(1, 2, 3, 4, requires_grad=True) for _ in range(3)]
    results = []
    for cache in (DynamicCache(), GrowingCache()):
        total = torch.zeros(())
        for step in keys:
            seen, values = cache.update(step, step * 2, 0)
            total = total + (seen.square() * values).sum()
        results.append(torch.autograd.grad(total, keys))
    for left, right in zip(*results, strict=True):
        assert torch.equal(left, right)


def test_a_prompt_read_in_inference_mode_may_be_continued_outside() -> None:
    cache = GrowingCache(reserve=32)
    first, second = tokens(1, 4), tokens(1, 1)
    with torch.inference_mode():
        cache.update(*first, 0)
    with torch.no_grad():
        keys, _ = cache.update(*second, 0)
        cache.reorder_cache(torch.tensor([0]))
    assert torch.equal(keys, torch.cat([first[0], second[0]], dim=2))


@pytest.mark.gpu
def test_offloading_moves_the_tokens_off_the_device() -> None:
    cache = GrowingCache()
    with torch.no_grad():
        keys, values = (t.cuda() for t in tokens(2, 5))
        cache.update(keys, values, 0)
        layer = cache.layers[0]
        layer.offload()
        assert layer.keys.device.type == "cpu"
        layer.prefetch()
        assert layer.keys.device.type == "cuda"
        assert torch.equal(layer.keys, keys)


def test_a_crop_by_a_positive_number_or_beyond_what_a_sliding_layer_kept_is_refused() -> None:
    for cache in (GrowingCache(), GrowingCache(config=sliding_config())):
        cache.update(*tokens(1, 3), 0)
        with pytest.raises(ValueError, match="tokens_to_remove: got 2"):
            cache.crop(2)
    sliding = GrowingCache(config=sliding_config())
    for layer in range(2):
        sliding.update(*tokens(1, WINDOW + 1), layer)
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        sliding.crop(-1)


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(
    "layer", [CachedLayer("model"), CachedLayer("k8v4"), CachedLayer("int8", sliding_window=WINDOW)]
)
def test_tokens_of_other_rows_are_refused(layer: Any, rows: int) -> None:
    layer.reset()
    layer.update(*[torch.zeros(2, 2, 3, 32)] * 2)
    with pytest.raises(ValueError, match=f"got tokens of {rows} sequences for a cache that holds 2"):
        layer.update(*[torch.zeros(rows, 2, 1, 32)] * 2)


@pytest.mark.parametrize("dtypes", list(itertools.permutations((torch.bfloat16, torch.float16, torch.float32))))
def test_tokens_of_several_dtypes_are_kept_in_the_widest(dtypes: tuple[torch.dtype, ...]) -> None:
    stock, ours = DynamicCache(), GrowingCache()
    for dtype in dtypes:
        more = tuple(tensor.to(dtype) for tensor in tokens(2, 3))
        for expected, found in zip(stock.update(*more, 0), ours.update(*more, 0), strict=True):
            assert found.dtype is expected.dtype
            assert torch.equal(found, expected)


def test_a_cache_that_holds_tokens_is_not_changed() -> None:
    cache = DynamicCache()
    cache.update(*tokens(1, 3), 0)
    with pytest.raises(ValueError, match="holds tokens already"):
        convert_layers(cache, "model")


FLOWS: dict[str, dict[str, Any]] = {
    "greedy": {}, "beam": {"num_beams": 3, "num_return_sequences": 2},
    "sample": {"do_sample": True, "num_return_sequences": 2}, "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "chunked prefill": {"prefill_chunk_size": 4}, "drafts of an assistant": {},
}  # fmt: skip


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("name", MODELS)
def test_generate_gives_the_same_tokens(name: str, flow: str) -> None:
    window = {"sliding_window": WINDOW} if name == "mistral" else {}
    model = MODELS[name](seed=3, **window)
    batch = 1 if flow in ("prompt lookup", "drafts of an assistant") else 2
    ids = torch.randint(3, 61, (batch, 11), generator=torch.Generator().manual_seed(5))
    ids = torch.cat([ids, ids[:, :4]], dim=1)
    settings = {"max_new_tokens": 14, "pad_token_id": 0, "eos_token_id": None, **FLOWS[flow]}
    if flow == "drafts of an assistant":
        settings["assistant_model"] = MODELS[name](seed=4, **window)
    outs = []
    for cache in (DynamicCache, GrowingCache):
        torch.manual_seed(0)
        outs.append(model.generate(ids, past_key_values=cache(config=model.config), **settings))
    assert torch.equal(*outs)


def test_attention_reads_the_storage_without_copying_it() -> None:
    """One token of a long past must not allocate what the past takes."""
    model = llama()
    past = 4000
    cache = GrowingCache(config=model.config, reserve=past + 8)
    limit = 2 * 32 * past // 2  # numbers in half of one layer's keys
    with torch.no_grad():
        for layer in range(2):
            cache.update(*torch.randn(2, 1, 2, past, 32), layer)
        with Largest() as seen:
            model(torch.tensor([[3]]), past_key_values=cache)
        stock = DynamicCache(config=model.config)
        for layer in range(2):
            stock.update(*torch.randn(2, 1, 2, past, 32), layer)
        with Largest() as seen_stock:
            model(torch.tensor([[3]]), past_key_values=stock)
    assert seen.allocated < limit
    assert seen_stock.allocated > limit  # the measure does see concatenation
