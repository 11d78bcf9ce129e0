"""Of several CUDA devices a kernel is launched on the one that holds the tensors, whichever is current."""

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

triton = pytest.importorskip("triton")

from adaattn_hf.attention.call import AttentionCall, AttentionResult  # noqa: E402
from adaattn_hf.attention.heads import HeadRules  # noqa: E402  (imports triton)
from adaattn_hf.attention.stored import StoredKV, quantise  # noqa: E402
from adaattn_hf.attention.structure import MaskStructure  # noqa: E402
from adaattn_hf.backends import flash, select  # noqa: E402
from adaattn_hf.backends.flash import Flash4Backend  # noqa: E402
from adaattn_hf.backends.sdpa import kernels  # noqa: E402
from adaattn_hf.backends.select import BACKENDS  # noqa: E402
from adaattn_hf.backends.triton import backward, forward, step, tables  # noqa: E402
from adaattn_hf.backends.triton.launch import Launcher, device_facts  # noqa: E402

from ..support.calls import attended  # noqa: E402
from ..support.on_device import Devices, OnSecond, told_of  # noqa: E402

N = 70
WINDOWS = HeadRules((9, 0), (3, 0), ("model", "model"))


def call(q_len: int = N, rules: HeadRules | None = None, grad: bool = False) -> AttentionCall:
    """A causal call of four heads over two, whose tensors say that they lie on the second device."""
    query, key, value = (
        torch.randn(2, heads, length, 32).half().as_subclass(OnSecond).requires_grad_(grad)
        for heads, length in ((4, q_len), (2, N), (2, N))
    )
    structure = MaskStructure(2, q_len, N, causal=True, q_offset=N - q_len)
    return AttentionCall(query, key, value, structure, 0.3, per_head=rules)


def over_codes(asked: AttentionCall) -> AttentionCall:
    (key, key_scale), (value, value_scale) = quantise(asked.key.float()), quantise(asked.value.float())
    return AttentionCall(asked.query, key, value, asked.structure, 0.3, stored=StoredKV(key_scale, value_scale))


CALLS = {
    "prefill": call(), "windows per head": call(rules=WINDOWS), "a step": call(1),
    "a step over codes": over_codes(call(1)), "gradients": call(rules=WINDOWS, grad=True),
}  # fmt: skip


class Noted:
    """As `triton.jit` makes a kernel; computes nothing, and notes where it is launched.

    What was made by a factory, as bitmaps of blocks are, says of no device that it lies there.
    """

    arg_names = ()

    def __init__(self, launched: list[int]) -> None:
        self.launched = launched

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(first: torch.Tensor, *_: Any, **constants: Any) -> Noted:
            if first.get_device() >= 0:
                self.launched.append(torch._C._cuda_getDevice())
            return self

        return launch


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Which device was current at each launch of a Triton kernel over tensors of the second one."""
    found: list[int] = []
    for module in (forward, backward, step, tables):
        for one in vars(module).values():
            if isinstance(one, Launcher):
                monkeypatch.setattr(one, "_kernel", Noted(found))
                monkeypatch.setattr(one, "_variants", {})
    return found


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("name", CALLS)
def test_kernels_go_to_the_device_of_the_tensors(
    monkeypatch: pytest.MonkeyPatch, launched: list[int], name: str, current: int
) -> None:
    devices = Devices(monkeypatch, current)
    out = attended("triton", CALLS[name]).out
    if out.requires_grad:
        out.sum().backward()
    assert launched
    assert set(launched) == {1}
    assert devices.current == current
    assert devices.entered == [] if current == 1 else set(devices.entered) == {1}


def test_a_call_that_fails_leaves_the_current_device_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Noted):
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            raise RuntimeError("out of resources")

    devices = Devices(monkeypatch)
    with pytest.raises(RuntimeError, match="out of resources"):
        Launcher(Broken([]))((1,), (call().query,), {}, None)
    assert (devices.current, devices.entered) == (0, [1])


@pytest.mark.parametrize("current", [0, 1])
def test_flash_attn_4_is_called_on_the_device_of_the_tensors(monkeypatch: pytest.MonkeyPatch, current: int) -> None:
    devices, backend, seen = Devices(monkeypatch, current), Flash4Backend(), list[int]()

    def attend(asked: AttentionCall, *_: object) -> AttentionResult:
        seen.append(devices.current)
        return AttentionResult(asked.query)

    monkeypatch.setattr(flash, "attend_runs", attend)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", ModuleType("flash_attn.cute"))
    attended(backend, call())
    assert (seen, devices.current, devices.entered) == ([1], current, [1] * (1 - current))


@pytest.fixture
def unlike(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    told_of(monkeypatch, (9, 0), (7, 5))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=4))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    device_facts.cache_clear()
    yield
    device_facts.cache_clear()


@pytest.mark.usefixtures("unlike")
@pytest.mark.parametrize(("index", "able"), [(None, True), (0, True), (1, False)])
def test_what_a_device_can_do_is_asked_of_the_one_that_holds_the_tensors(index: int | None, able: bool) -> None:
    device = torch.device("cuda") if index is None else torch.device("cuda", index)
    kind = call().checked_kind()._replace(device=device, dtype=torch.bfloat16)
    for name in ("triton", "fa2", "fa3", "fa4"):
        reasons = [reason for reason in BACKENDS[name].refusals(kind) if "installed" not in reason]
        assert bool(reasons) is not able
    assert kernels.steps_by_flash(kind) is able
    heavy = kind._replace(head_dim=128, head_dim_v=128, shape="causal", pairs=1 << 31, keys=4096)
    with_gluon = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)
    assert ("triton" in select.order(heavy)) is (able and with_gluon)


def test_a_kind_says_which_device_holds_the_tensors() -> None:
    with FakeTensorMode():
        query = torch.empty(1, 2, 8, 16, device="cuda:1")
    structure = MaskStructure(1, 8, 8)
    assert AttentionCall(query, query, query, structure, 1.0).checked_kind().device == torch.device("cuda", 1)
    assert call().checked_kind().device == torch.device("cpu")
