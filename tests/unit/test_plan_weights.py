"""The snapshot of a module's weights notices whatever may have changed them since the plan was checked."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from adaattn_hf.patches.plans.snapshot import Snapshot


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


CHANGES: dict[str, Callable[[Any], Any]] = {
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
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(change: str) -> None:
    changed = module()
    weights = Snapshot(changed)
    assert weights.same()
    CHANGES[change](changed)
    assert not weights.same()


def test_a_pass_changes_nothing() -> None:
    used = module()
    weights = Snapshot(used)
    used.q_proj(torch.ones(4)).sum().backward()
    assert weights.same()


def quantised() -> Any:
    """Layers that keep codes in buffers, beside one that passes set by their length."""
    made = module()
    for part in (made.q_proj, made.k_proj):
        del part.weight
        part.register_buffer("codes", torch.ones(4, 4, dtype=torch.int8))
        part.register_buffer("passing", torch.ones(1), persistent=False)
        part.rope_type = "dynamic"
    return made


CHANGES_OF_CODES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda part: part.codes.add_(1),
    "others": lambda part: setattr(part, "codes", part.codes.clone()),
    "elsewhere": lambda part: setattr(part.codes, "data", part.codes.data.clone()),
    "none": lambda part: setattr(part, "codes", None),
    "deleted": lambda part: delattr(part, "codes"),
}


@pytest.mark.parametrize("change", CHANGES_OF_CODES)
def test_a_change_of_a_buffer_is_noticed(change: str) -> None:
    changed = quantised()
    weights = Snapshot(changed)
    changed.k_proj.passing = torch.zeros(1)
    assert weights.same()
    CHANGES_OF_CODES[change](changed.k_proj)
    assert not weights.same()


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
