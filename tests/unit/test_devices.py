"""Of several CUDA devices a kernel is launched on the one that holds the tensors, whichever is current."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

triton = pytest.importorskip("triton")

from adaattn_hf.attention.heads import HeadRules  # noqa: E402  (imports triton)
from adaattn_hf.attention.request import AttentionRequest, AttentionResult  # noqa: E402
from adaattn_hf.attention.stored import StoredKV, quantise  # noqa: E402
from adaattn_hf.attention.structure import CallStructure  # noqa: E402
from adaattn_hf.backends import capability, select  # noqa: E402
from adaattn_hf.backends.flash import Flash4Backend, fa4_launch  # noqa: E402
from adaattn_hf.backends.sdpa import kernels  # noqa: E402
from adaattn_hf.backends.select import BACKENDS  # noqa: E402
from adaattn_hf.backends.triton import hopper, prefill, step, tables, training  # noqa: E402
from adaattn_hf.backends.triton.launcher import Launcher  # noqa: E402

from ..support.on_device import Devices, OnSecond  # noqa: E402
from ..support.requests import attended  # noqa: E402

N = 70
WINDOWS = HeadRules((9, 0), (3, 0), ("model", "model"))


def call(q_len: int = N, rules: HeadRules | None = None, grad: bool = False) -> AttentionRequest:
    """A causal call of four heads over two, whose tensors say that they lie on the second device."""
    query, key, value = (
        torch.randn(2, heads, length, 32).half().as_subclass(OnSecond).requires_grad_(grad)
        for heads, length in ((4, q_len), (2, N), (2, N))
    )
    structure = CallStructure(2, q_len, N, causal=True, q_offset=N - q_len)
    return AttentionRequest(query, key, value, structure, 0.3, per_head=rules)


def by_request(asked: AttentionRequest) -> None:
    attended(BACKENDS["triton"], asked)


def by_launch(asked: AttentionRequest) -> None:
    launch = BACKENDS["triton"].prepare(asked.checked_kind(), asked.per_head)
    launch(asked.query, asked.key, asked.value, 0.3, asked.structure)


def both_passes(asked: AttentionRequest) -> None:
    attended(BACKENDS["triton"], asked).out.sum().backward()


def over_codes(asked: AttentionRequest) -> None:
    (key, key_scale), (value, value_scale) = quantise(asked.key.float()), quantise(asked.value.float())
    record = StoredKV(key_scale, value_scale, None, None)
    attended(BACKENDS["triton"], AttentionRequest(asked.query, key, value, asked.structure, 0.3, stored=record))


CALLS: dict[str, tuple[Callable[[AttentionRequest], None], AttentionRequest]] = {
    "prefill": (by_request, call()),
    "windows per head": (by_request, call(rules=WINDOWS)),
    "a launch": (by_launch, call(rules=WINDOWS)),
    "a step": (by_request, call(1)),
    "a step over codes": (over_codes, call(1)),
    "gradients": (both_passes, call(rules=WINDOWS, grad=True)),
}


class Noted:
    """As `triton.jit` makes a kernel; computes nothing, and notes where it is launched.

    What was made by a factory, as bitmaps of blocks are, says of no device that it lies there.
    """

    arg_names = ()

    def __init__(self, launched: list[int]) -> None:
        self.launched = launched

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(first: torch.Tensor, *_: Any, **constants: Any) -> None:
            if first.get_device() >= 0:
                self.launched.append(torch._C._cuda_getDevice())

        return launch


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Which device was current at each launch of a Triton kernel over tensors of the second one."""
    found: list[int] = []
    for module in (prefill, step, tables, training):
        for one in vars(module).values():
            if isinstance(one, Launcher):
                monkeypatch.setattr(one, "_kernel", Noted(found))
    return found


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("name", CALLS)
def test_kernels_go_to_the_device_of_the_tensors(
    monkeypatch: pytest.MonkeyPatch, launched: list[int], name: str, current: int
) -> None:
    run, asked = CALLS[name]
    devices = Devices(monkeypatch, current)
    run(asked)
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

    def attend(asked: AttentionRequest) -> AttentionResult:
        seen.append(devices.current)
        return AttentionResult(asked.query)

    monkeypatch.setattr(fa4_launch, "attend", attend)
    attended(backend, call())
    assert (seen, devices.current, devices.entered) == ([1], current, [1] * (1 - current))


@pytest.fixture
def unlike(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    sms = {0: (9, 0), 1: (7, 5)}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(capability, "_of_device", lambda index: capability.of_sm(sms[index]))
    monkeypatch.setattr(hopper, "_installed", lambda: True)
    kernels._cudnn_comes_first.cache_clear()
    yield
    kernels._cudnn_comes_first.cache_clear()


@pytest.mark.usefixtures("unlike")
@pytest.mark.parametrize(("index", "able"), [(None, True), (0, True), (1, False)])
def test_what_a_device_can_do_is_asked_of_the_one_that_holds_the_tensors(index: int | None, able: bool) -> None:
    spec = call().checked_kind()._replace(device="cuda", dtype=torch.bfloat16, device_index=index)
    for name in ("triton", "fa2", "fa3", "fa4"):
        reasons = [reason for reason in BACKENDS[name].refusals(spec) if "installed" not in reason]
        assert bool(reasons) is not able
    assert kernels.steps_by_flash(spec) is able
    heavy = spec._replace(head_dim=128, head_dim_v=128, kind="causal", pairs=1 << 31, keys=4096)
    assert ("triton" in select.order(heavy)) is able


def test_a_spec_says_which_device_holds_the_tensors() -> None:
    with FakeTensorMode():
        query = torch.empty(1, 2, 8, 16, device="cuda:1")
    structure = CallStructure(1, 8, 8)
    assert AttentionRequest(query, query, query, structure, 1.0).checked_kind().device_index == 1
    assert call().checked_kind().device_index is None
