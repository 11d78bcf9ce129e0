"""Decode steps on datacentre devices go to torch's flash kernel, which needs no plan for every number of keys."""

import pytest
import torch

from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.kind import GRAD
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends.capability import of_sm
from adaattn_hf.backends.sdpa import dispatch, kernels

from ..support.operators import NamedOperators

FLASH = "aten::_scaled_dot_product_flash_attention"


@pytest.fixture(params=[(9, 0)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "capability", lambda _: of_sm(request.param))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)


def _step(kv_len: int = 40, seen: int = 40, dim: int = 64, dtype: torch.dtype = torch.bfloat16) -> list[str]:
    query = torch.empty(3, 8, 1, dim, device="meta", dtype=dtype)
    key = torch.empty(3, 2, kv_len, dim, device="meta", dtype=dtype)
    structure = MaskStructure(3, 1, kv_len, causal=True, q_offset=seen - 1)
    call = AttentionCall(query, key, key, structure, 0.125)
    way = dispatch.way_of(call.checked_kind()._replace(device=torch.device("cuda")))
    with NamedOperators() as noted:
        out = way(call)
    assert out is not None
    assert out.shape == (3, 1, 8, dim)
    names: list[str] = noted.names
    return names


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("seen", [40, 17])
def test_a_step_is_one_call_of_the_flash_kernel(seen: int) -> None:
    names = _step(seen=seen)
    assert names.count(FLASH) == 1
    assert ("aten::slice" in names) == (seen < 40)


@pytest.mark.usefixtures("device")
def test_other_calls_are_left_to_torch() -> None:
    assert FLASH not in _step(dtype=torch.float32)
    assert FLASH not in _step(dim=20)
    assert FLASH not in _step(dim=512)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert FLASH not in _step()


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("device", [(8, 0), (8, 9), (12, 0)], indirect=True)
def test_where_torch_takes_flash_by_itself_it_is_asked_plainly() -> None:
    assert FLASH not in _step()


def test_gradients_go_through_the_operator(device: None) -> None:
    query = torch.empty(1, 2, 1, 64, dtype=torch.float16, requires_grad=True)
    key = torch.empty(1, 2, 8, 64, dtype=torch.float16)
    structure = MaskStructure(1, 1, 8, causal=True, q_offset=7)
    kind = AttentionCall(query, key, key, structure, 0.125).checked_kind()._replace(device=torch.device("cuda"))
    assert kind.needs_grad
    assert not kernels.steps_by_flash(kind)
    assert kernels.steps_by_flash(kind._replace(features=kind.features & ~GRAD))
