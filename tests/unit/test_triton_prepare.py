"""The fast call of the Triton kernels: what it computes, what it is left for, and what it keeps."""

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from adaattn_hf.attention import reference
from adaattn_hf.attention.heads import HeadRules
from adaattn_hf.attention.request import AttentionRequest
from adaattn_hf.attention.structure import CallStructure
from adaattn_hf.backends.select import BACKENDS
from adaattn_hf.backends.triton import prefill
from adaattn_hf.backends.triton.launch import attend

from ..support.on_device import OnCuda, OnSecond, shifted
from .test_triton import LEFT, N, interpreted

DOCUMENTS = torch.repeat_interleave(torch.arange(3), torch.tensor([10, 40, 20]))[None].expand(2, -1)
WINDOWS = HeadRules((9, 0), (3, 0), ("model", "model"))


def structure(name: str) -> CallStructure:
    rules: dict[str, dict[str, Any]] = {
        "causal": {"causal": True},
        "both ways": {},
        "left padding": {"causal": True, "key_padding": LEFT},
        "documents": {"causal": True, "q_segments": DOCUMENTS, "k_segments": DOCUMENTS},
    }
    return CallStructure(2, N, N, **rules[name])


def make(asked: CallStructure, rules: HeadRules | None = WINDOWS, dim: int = 32) -> AttentionRequest:
    q, k, v = (
        torch.randn(2, asked.q_len if heads == 4 else asked.kv_len, heads, dim).half().transpose(1, 2)
        for heads in (4, 2, 2)
    )
    return AttentionRequest(q, k, v, asked, 0.3, per_head=rules)


def prepared(request: AttentionRequest) -> Any:
    launch = BACKENDS["triton"].prepare(request.checked_kind(), request.per_head)
    return lambda query, key, value, scaling: launch(query, key, value, scaling, request.structure)


def call(fast: Any, request: AttentionRequest) -> Tensor:
    out: Tensor = fast(request.query, request.key, request.value, request.scaling)
    return out


@interpreted
@pytest.mark.parametrize("least", [0, 1 << 40], ids=["by TMA", "by addresses"])
@pytest.mark.parametrize("rules", [WINDOWS, None], ids=["windows", "exact"])
@pytest.mark.parametrize("name", ["causal", "both ways", "left padding", "documents"])
def test_equals_the_definition(monkeypatch: pytest.MonkeyPatch, name: str, rules: HeadRules | None, least: int) -> None:
    monkeypatch.setattr(prefill, "_LEAST_PRODUCTS", least)
    fast = prepared(first := make(structure(name), rules))
    assert torch.equal(call(fast, first), attend(first).out)
    for other in (make(first.structure, rules), replace(make(first.structure, rules), scaling=0.1)):
        truth = reference.attention(other).out
        torch.testing.assert_close(call(fast, other).double(), truth, atol=4e-3, rtol=0)


@interpreted
@pytest.mark.usefixtures("bulk_always")
@pytest.mark.parametrize("what", ["query", "key", "value"])
def test_layers_may_lie_otherwise_in_memory(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """TMA brings no tensors that begin elsewhere."""
    launched: list[bool] = []
    real = prefill.launch_forward

    def noted(grid: Any, arguments: Any, constants: Any, kind: Any) -> None:
        launched.append(constants["BULK"])
        real(grid, arguments, constants, kind)

    monkeypatch.setattr(prefill, "launch_forward", noted)
    request = make(structure("causal"))
    fast, truth = prepared(request), reference.attention(request).out
    tensor = getattr(request, what)
    ways = [request, *(replace(request, **{what: one}) for one in (tensor.contiguous(), shifted(tensor)))]
    for one in ways + ways:
        torch.testing.assert_close(call(fast, one).double(), truth, atol=4e-3, rtol=0)
    assert launched == [True, True, False] * 2


@pytest.mark.parametrize("what", [0, 1, 2], ids=["query", "key", "value"])
def test_tensors_of_other_devices_are_refused(what: int) -> None:
    """Their addresses would be read."""
    request = make(structure("causal"))
    tensors = [request.query, request.key, request.value]
    tensors[what] = tensors[what].as_subclass(OnSecond)
    with pytest.raises(ValueError, match="expected one device"):
        prepared(request)(*tensors, 0.3)


@interpreted
def test_keeps_neither_tensors_nor_the_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "launch_forward", lambda *_: None)
    request = make(structure("left padding"))
    launch = BACKENDS["triton"].prepare(request.checked_kind())
    launch(request.query, request.key, request.value, request.scaling, request.structure)
    kept = [weakref.ref(one) for one in (request.query, request.key, request.value, request.structure)]
    gc.disable()
    try:
        del request
        assert [one() for one in kept] == [None] * 4
    finally:
        gc.enable()


@interpreted
@pytest.mark.parametrize("least", [0, 1 << 40], ids=["by TMA", "by addresses"])
def test_on_a_device_calls_have_a_kind_by_which_variants_are_kept(monkeypatch: pytest.MonkeyPatch, least: int) -> None:
    """Odd addresses and learned sinks need Triton's look; strides of another length are of another kind."""
    kinds: list[tuple[bool, Any]] = []
    real = prefill.launch_forward

    def noted(grid: Any, arguments: Any, constants: Any, kind: Any) -> None:
        kinds.append((constants["BULK"], kind))
        real(grid, arguments, constants, None)

    monkeypatch.setattr(prefill, "_LEAST_PRODUCTS", least)
    monkeypatch.setattr(prefill, "launch_forward", noted)
    request = make(structure("left padding"))
    query = request.query.as_subclass(OnCuda)
    fast, truth = prepared(replace(request, query=query)), reference.attention(request).out
    for key in (request.key, request.key, shifted(request.key)):
        out = fast(query, key, request.value, 0.3)
        torch.testing.assert_close(out.as_subclass(Tensor).double(), truth, atol=4e-3, rtol=0)
    with_lse = attend(replace(request, query=query, need_lse=True))
    torch.testing.assert_close(with_lse.out.as_subclass(Tensor).double(), truth, atol=4e-3, rtol=0)
    attend(replace(request, query=query, sink_logits=torch.zeros(4)))
    shorter = make(CallStructure(2, N - 1, N, causal=True))
    attend(replace(shorter, query=shorter.query.as_subclass(OnCuda)))
    by_tma, asked = zip(*kinds, strict=True)
    assert by_tma == (not least, not least, False, not least, not least, not least)
    assert [kind is None for kind in asked] == [False, False, True, False, True, False]
    assert len({asked[0], asked[1]}) == 1
    assert len({asked[0], asked[3], asked[5]}) == 3
