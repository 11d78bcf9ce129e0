"""The snapshot of a module's weights notices whatever may have changed them since the plan was checked."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from adaattn_hf.patches.plans.weights import Weights


def module() -> Any:
    made = nn.Module()
    for name in ("q_proj", "k_proj"):
        made.add_module(name, nn.Linear(4, 4))
    return made


@torch.no_grad()
def in_place(module: Any) -> None:
    module.k_proj.weight.mul_(2.0)


def other_memory(module: Any) -> None:
    module.k_proj.weight.data = module.k_proj.weight.data.clone()


def other_parameter(module: Any) -> None:
    module.k_proj.weight = nn.Parameter(module.k_proj.weight.detach())


def no_bias(module: Any) -> None:
    module.k_proj.bias = None


def one_more_parameter(module: Any) -> None:
    module.k_proj.register_parameter("scale", nn.Parameter(torch.ones(4)))


def one_less_parameter(module: Any) -> None:
    del module.k_proj.bias


def wrapped(module: Any) -> None:
    module.k_proj = nn.Sequential(module.k_proj)


def one_more_child(module: Any) -> None:
    module.add_module("adapter", nn.Identity())


def one_less_child(module: Any) -> None:
    del module.k_proj


def exchanged(module: Any) -> None:
    module.q_proj, module.k_proj = module.k_proj, module.q_proj


def moved_over_a_border(module: Any) -> None:
    q_proj, k_proj = module.q_proj._parameters, module.k_proj._parameters
    moved, kept = q_proj.pop("bias"), dict(k_proj)
    k_proj.clear()
    k_proj.update(first=moved, **kept)


CHANGES: tuple[Callable[[Any], None], ...] = (
    in_place, other_memory, other_parameter, no_bias, one_more_parameter, one_less_parameter, wrapped, one_more_child,
    one_less_child, exchanged, moved_over_a_border,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_is_noticed(change: Callable[[Any], None]) -> None:
    changed = module()
    weights = Weights.of(changed)
    assert weights.same()
    change(changed)
    assert not weights.same()


def test_a_pass_changes_nothing() -> None:
    used = module()
    weights = Weights.of(used)
    used.q_proj(torch.ones(4)).sum().backward()
    assert weights.same()


def quantised() -> Any:
    """Layers that keep codes in buffers, beside one that comes anew with every pass."""
    made = module()
    for part in (made.q_proj, made.k_proj):
        del part.weight
        part.register_buffer("codes", torch.ones(4, 4, dtype=torch.int8))
        part.register_buffer("passing", torch.ones(1), persistent=False)
    return made


def codes_in_place(module: Any) -> None:
    module.k_proj.codes.add_(1)


def other_codes(module: Any) -> None:
    module.k_proj.codes = module.k_proj.codes.clone()


def codes_elsewhere(module: Any) -> None:
    module.k_proj.codes.data = module.k_proj.codes.data.clone()


def no_codes(module: Any) -> None:
    module.k_proj.codes = None


def less_codes(module: Any) -> None:
    del module.k_proj.codes


@pytest.mark.parametrize(
    "change", [codes_in_place, other_codes, codes_elsewhere, no_codes, less_codes], ids=lambda one: one.__name__
)
def test_a_change_of_a_buffer_is_noticed(change: Callable[[Any], None]) -> None:
    changed = quantised()
    weights = Weights.of(changed)
    changed.k_proj.passing = torch.zeros(1)
    assert weights.same()
    change(changed)
    assert not weights.same()


def test_what_an_adapter_trains_is_no_change_and_what_it_wraps_is() -> None:
    used = module()
    adapter: Any = nn.Module()
    adapter.base_layer, adapter.lora_A = used.k_proj, nn.Linear(4, 2)
    used.k_proj = adapter
    weights = Weights.of(used)
    with torch.no_grad():
        adapter.lora_A.weight.add_(1.0)
        assert weights.same()
        adapter.base_layer.weight.add_(1.0)
    assert not weights.same()
    weights = Weights.of(used)
    adapter.base_layer = nn.Linear(4, 4)
    assert not weights.same()


def test_tensors_of_inference_mode_are_watched_by_what_they_have() -> None:
    with torch.inference_mode():
        used = module()
        weights = Weights.of(used)
        assert weights.same()
        used.k_proj.weight = nn.Parameter(torch.zeros(4, 4), requires_grad=False)
        assert not weights.same()


def test_tensors_of_tensors_are_watched_by_their_parts() -> None:
    used, second = nn.Module(), torch.ones(4, 4)
    used.register_buffer("weight", TwoTensor(torch.ones(4, 4), second))
    weights = Weights.of(used)
    assert weights.same()
    second.add_(1.0)
    assert not weights.same()
