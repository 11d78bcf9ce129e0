"""The hash of weights, which every entry of every tensor enters; the snapshot that notices when to ask it again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from adaattn_hf.patches.plans import hashes
from adaattn_hf.patches.plans.hashes import model_hash, weight_hash
from adaattn_hf.patches.plans.parts import module_dtype
from adaattn_hf.patches.plans.snapshot import Snapshot
from adaattn_hf.plans.record import PlanError

DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8, torch.int64, torch.bool,
    torch.float8_e4m3fn,
]  # fmt: skip


def holder(**tensors: Any) -> Any:
    made: Any = nn.Module()
    for name, tensor in tensors.items():
        made.register_buffer(name, tensor)
    return made


def hashed(tensor: Tensor) -> str:
    return weight_hash(holder(weight=tensor))


def drawn(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    drawn = torch.randint(0, 2**15, shape, generator=torch.Generator().manual_seed(0))
    return drawn.to(dtype) if dtype is torch.bool else (drawn % 100).to(dtype)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 24), min_size=0, max_size=3).map(tuple), dtype=st.sampled_from(DTYPES),
    place=st.integers(0, 10**6), entries=st.sampled_from([1, 7, 1 << 20]),
)  # fmt: skip
def test_each_entry_enters(shape: tuple[int, ...], dtype: torch.dtype, place: int, entries: int) -> None:
    tensor = drawn(shape, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashes, "_ENTRIES", entries)  # pieces of any size add up to the same
        before = hashed(tensor)
    assert hashed(tensor.clone()) == before
    other = tensor.clone()
    flat = other.view(torch.uint8).reshape(-1) if tensor.ndim else other.reshape(1).view(torch.uint8)
    flat[place % flat.numel()] ^= 1
    assert hashed(other.view(dtype).reshape(shape)) != before


@pytest.mark.parametrize("size", [512, 513, 4096])
def test_columns_between_samples_are_seen(size: int) -> None:
    """As many entries apart as an earlier version's samples were: it saw 16 of 4,096 columns."""
    weight = torch.ones(size, size)
    before = hashed(weight)
    weight[:, torch.arange(size) % max(2, size * size // 65536) != 0] = 0
    assert hashed(weight) != before


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "rows exchanged": lambda w: w[torch.arange(w.shape[0]).roll(1)],
    "columns exchanged": lambda w: w[:, torch.arange(w.shape[1]).roll(1)],
    "signs of two columns": lambda w: w * torch.where(torch.arange(w.shape[1]) % 4 == 3, -1.0, 1.0),
    "all signs": lambda w: -w, "a row of zeros": lambda w: w * (torch.arange(w.shape[0]) != 3)[:, None],
    "transposed": lambda w: w.T.contiguous(), "another shape": lambda w: w.reshape(64, -1),
    "another dtype": lambda w: w.to(torch.float16),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_happens_to_weights_is_seen(change: str) -> None:
    weight = torch.randn(128, 128, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    dtype = torch.float16 if change == "another dtype" else weight.dtype
    assert hashed(CHANGES[change](weight).to(dtype)) != hashed(weight)


def test_layout_in_memory_is_not_seen() -> None:
    weight = drawn((70, 66), torch.bfloat16)
    room = torch.zeros(weight.numel() + 1, dtype=weight.dtype)
    shifted = room[1:].view(70, 66)  # two bytes off what is read at a time
    shifted.copy_(weight)
    for same in (shifted, weight.T.contiguous().T, weight.to_sparse(), weight[:, None].expand(-1, 1, -1)[:, 0]):
        assert hashed(same) == hashed(weight)


def test_numbers_of_threads_agree() -> None:
    weight, before = drawn((300, 512)), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(hashed(weight))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]


def test_buffers_enter_and_those_that_are_not_saved_do_not() -> None:
    module = holder(codes=drawn((8, 8), torch.int8))
    before = weight_hash(module)
    module.register_buffer("passing", torch.ones(3), persistent=False)
    assert weight_hash(module) == before
    module.codes[3, 3] += 1
    assert weight_hash(module) != before


class Extra(nn.Linear):
    """A layer with a state beside its tensors, as quantised ones have."""

    state: Any = ("nf4", 64, torch.float16, None)

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def test_states_beside_tensors_enter_or_are_refused() -> None:
    layer = Extra(4, 4)
    before = weight_hash(layer)
    layer.state = ("nf4", 128, torch.float16, None)
    assert weight_hash(layer) != before
    layer.state = object()
    with pytest.raises(PlanError, match="is saved as object, expected a tensor or plain values"):
        weight_hash(layer)


def test_tensors_of_tensors_enter_with_all_their_parts() -> None:
    first, second = torch.ones(8, 8), torch.ones(8, 8)
    before = weight_hash(holder(weight=TwoTensor(first, second)))
    assert weight_hash(holder(weight=TwoTensor(first.clone(), second.clone()))) == before
    second[2, 2] = 3.0
    assert weight_hash(holder(weight=TwoTensor(first, second))) != before


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module, name: str) -> None:
        super().__init__()
        self.add_module(name, inner)
        self.lora_A = nn.Linear(4, 2)


@pytest.mark.parametrize("name", ["base_layer", "original_module", "_orig_mod"])
def test_wrappers_are_looked_through(name: str) -> None:
    module: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = weight_hash(module)
    module[1] = Wrapper(Wrapper(module[1], name), "base_layer")
    assert weight_hash(module) == before
    with torch.no_grad():
        module[1].base_layer.get_submodule(name).weight[1, 1] += 1.0
    assert weight_hash(module) != before


def test_a_model_has_one_hash_whatever_wraps_it() -> None:
    class Model(nn.Module):
        base_model_prefix = "body"

        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    model = Model()
    before = model_hash(model)
    assert before.startswith("model:")
    assert model_hash(nn.Sequential(Wrapper(model, "anything"))) == before
    with torch.no_grad():
        model.head.weight.zero_()
    assert model_hash(model) == before
    with torch.no_grad():
        model.body.weight.zero_()
    assert model_hash(model) != before


def test_the_dtype_of_quantised_weights_is_that_of_their_scales_or_of_the_configuration() -> None:
    module = holder(codes=drawn((8, 8), torch.int8), scales=torch.ones(8, dtype=torch.float16))
    assert module_dtype(module) == "float16"
    del module.scales
    with pytest.raises(PlanError, match="no floating-point weights"):
        module_dtype(module)
    module.config = type("Config", (), {"dtype": torch.bfloat16})()
    assert module_dtype(module) == "bfloat16"


def module() -> Any:
    made = nn.Module()
    for name in ("q_proj", "k_proj"):
        made.add_module(name, nn.Linear(4, 4))
    return made


def exchanged(module: Any) -> None:
    module.q_proj, module.k_proj = module.k_proj, module.q_proj


def moved_over_a_border(module: Any) -> None:
    q_proj, k_proj = module.q_proj._parameters, module.k_proj._parameters
    moved, kept = q_proj.pop("bias"), dict(k_proj)
    k_proj.clear()
    k_proj.update(first=moved, **kept)


def quantised() -> Any:
    """Layers that keep codes in buffers, beside one that passes set by their length."""
    made = module()
    for part in (made.q_proj, made.k_proj):
        del part.weight
        part.register_buffer("codes", torch.ones(4, 4, dtype=torch.int8))
        part.register_buffer("passing", torch.ones(1), persistent=False)
        part.rope_type = "dynamic"
    return made


CHANGES_OF_PARTS: dict[str, Callable[[Any], Any]] = {
    "in place": lambda m: m.k_proj.weight.detach().mul_(2.0),
    "other memory": lambda m: setattr(m.k_proj.weight, "data", m.k_proj.weight.data.clone()),
    "other parameter": lambda m: setattr(m.k_proj, "weight", nn.Parameter(m.k_proj.weight.detach())),
    "no bias": lambda m: setattr(m.k_proj, "bias", None),
    "one more parameter": lambda m: m.k_proj.register_parameter("scale", nn.Parameter(torch.ones(4))),
    "one less parameter": lambda m: delattr(m.k_proj, "bias"),
    "wrapped": lambda m: setattr(m, "k_proj", nn.Sequential(m.k_proj)),
    "one more child": lambda m: m.add_module("adapter", nn.Identity()),
    "one less child": lambda m: delattr(m, "k_proj"),
    "exchanged": exchanged,
    "moved over a border": moved_over_a_border,
    "codes in place": lambda m: m.k_proj.codes.add_(1),
    "other codes": lambda m: setattr(m.k_proj, "codes", m.k_proj.codes.clone()),
    "codes elsewhere": lambda m: setattr(m.k_proj.codes, "data", m.k_proj.codes.data.clone()),
    "no codes": lambda m: setattr(m.k_proj, "codes", None),
    "codes deleted": lambda m: delattr(m.k_proj, "codes"),
}


@pytest.mark.parametrize("change", CHANGES_OF_PARTS)
def test_a_change_is_noticed(change: str) -> None:
    changed = quantised() if "codes" in change else module()
    weights = Snapshot(changed)
    changed.k_proj.passing = torch.zeros(1)
    assert weights.same()
    CHANGES_OF_PARTS[change](changed)
    assert not weights.same()


def test_a_pass_changes_nothing() -> None:
    used = module()
    weights = Snapshot(used)
    used.q_proj(torch.ones(4)).sum().backward()
    assert weights.same()


def test_what_an_adapter_trains_is_no_change_and_what_it_wraps_is() -> None:
    used = module()
    adapter: Any = nn.Module()
    adapter.base_layer, adapter.lora_A = used.k_proj, nn.Linear(4, 2)
    used.k_proj = adapter
    weights = Snapshot(used)
    with torch.no_grad():
        adapter.lora_A.weight.add_(1.0)
        assert weights.same()
        adapter.base_layer.weight.add_(1.0)
    assert not weights.same()
    weights = Snapshot(used)
    adapter.base_layer = nn.Linear(4, 4)
    assert not weights.same()


def test_tensors_of_inference_mode_are_watched_by_what_they_have() -> None:
    with torch.inference_mode():
        used = module()
        weights = Snapshot(used)
        assert weights.same()
        used.k_proj.weight = nn.Parameter(torch.zeros(4, 4), requires_grad=False)
        assert not weights.same()


def test_tensors_of_tensors_are_watched_by_their_parts() -> None:
    used, second = nn.Module(), torch.ones(4, 4)
    used.register_buffer("weight", TwoTensor(torch.ones(4, 4), second))
    weights = Snapshot(used)
    assert weights.same()
    second.add_(1.0)
    assert not weights.same()
