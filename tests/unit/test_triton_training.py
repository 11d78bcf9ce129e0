"""The Triton kernels' gradients under Triton's interpreter, against the reference's by autograd in float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from adaattn_hf.attention import reference
from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.structure import MaskStructure

from ..support.head_rules import rules
from .test_triton import STRUCTURES, attend, interpreted, make

LONG = MaskStructure(3, 301, 301, causal=True)


def gradients(call: AttentionCall, compute: Any, with_lse: bool) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in (call.query, call.key, call.value)]
    sink = call.sink_logits
    if sink is not None:
        sink = sink.detach().clone().requires_grad_()
        leaves.append(sink)
    result = compute(replace(call, query=leaves[0], key=leaves[1], value=leaves[2], sink_logits=sink))
    g = torch.Generator().manual_seed(3)
    total = (result.out.double() * torch.randn(result.out.shape, generator=g)).sum()
    if with_lse:
        total = total + (result.lse.double() * torch.randn(result.lse.shape, generator=g)).sum()
    return [grad.double() for grad in torch.autograd.grad(total, leaves)]


def check(call: AttentionCall, with_lse: bool = False) -> None:
    wide = replace(call, query=call.query.double(), key=call.key.double(), value=call.value.double())
    ours = gradients(call, attend, with_lse)
    true = gradients(wide, reference.attention, with_lse)
    for a, b in zip(ours, true, strict=True):
        assert (a - b).norm() <= 2e-3 * b.norm()


@interpreted
@pytest.mark.parametrize("name", [name for name, s in STRUCTURES.items() if name != "nothing to see"])
def test_gradients_equal_the_reference(name: str) -> None:
    check(make(STRUCTURES[name], 4, 2, 32, 32, need_lse=False))


@interpreted
@pytest.mark.parametrize("name", ["causal", "left padding", "few sinks"])
@pytest.mark.parametrize(
    "extra", [{"softcap": 1.5}, {"sink_logits": torch.tensor([0.5, -1.0, 2.0, 0.0])}], ids=["softcap", "sinks"]
)
def test_gradients_of_other_mathematics(name: str, extra: dict[str, Any]) -> None:
    check(make(STRUCTURES[name], 4, 4, 24, 40, need_lse=False, **extra))


@interpreted
def test_gradients_of_the_log_sum_exp() -> None:
    check(make(STRUCTURES["causal"], 4, 2, 16, 16), with_lse=True)


@interpreted
def test_second_derivatives_are_refused() -> None:
    call = make(STRUCTURES["causal"], 4, 2, 16, 16, need_lse=False)
    query = call.query.requires_grad_()
    out = attend(replace(call, query=query)).out
    (first,) = torch.autograd.grad(out.square().sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives of attention"):
        torch.autograd.grad(first.square().sum(), query)


@interpreted
def test_gradients_under_windows_per_head() -> None:
    check(make(LONG, 4, 2, 32, 32, need_lse=False, per_head=rules((0, 100), (0, 7))))
    check(make(STRUCTURES["documents"], 4, 2, 32, 32, need_lse=False, per_head=rules((5, 30), (2, 0))))


@interpreted
def test_nothing_to_see_has_no_gradient() -> None:
    for grad in gradients(make(STRUCTURES["nothing to see"], 4, 2, 16, 16, need_lse=False), attend, False):
        assert not grad.any()


@interpreted
@pytest.mark.parametrize("scaling", [0.0, -0.3])
@pytest.mark.parametrize("extra", [{}, {"softcap": 1.5}], ids=["plain", "softcap"])
def test_gradients_of_a_scaling_that_is_not_positive(scaling: float, extra: dict[str, Any]) -> None:
    call = make(STRUCTURES["causal"], 4, 2, 16, 16, **extra)
    check(replace(call, scaling=scaling), with_lse=True)
