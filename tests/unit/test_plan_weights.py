"""The snapshot of a module's weights notices whatever may have changed them since the plan was checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from adaattn_hf.plans.weights import Weights


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
    """The values of all dictionaries, one after the other, stay what they were."""
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
