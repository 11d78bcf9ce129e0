"""A variant that was launched is launched again without Triton; on a device `tests/gpu` compares what comes out."""

from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from adaattn_hf.backends.triton import launch  # noqa: E402  (imports triton)
from adaattn_hf.backends.triton.launch import Launcher  # noqa: E402

from ..support.on_device import Devices, Kernel, OnSecond  # noqa: E402

X, Y = (torch.zeros(4).as_subclass(OnSecond) for _ in range(2))
CONSTANTS = {"num_warps": 4, "CAUSAL": True, "BLOCK": 64}


class Compiled:
    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.log.append(("again", grid, arguments))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    Devices(monkeypatch, current=1)
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    return Kernel(("x", "n", "BLOCK", "CAUSAL"), Compiled)


def test_the_second_launch_of_a_kind_passes_triton_by(kernel: Kernel) -> None:
    launcher = Launcher(kernel)
    launcher((2, 3), (X, 5), CONSTANTS, "kind")
    launcher((7, 1), (Y, 6), CONSTANTS, "kind")
    assert kernel.log == [
        ("looked", (2, 3), (X, 5), CONSTANTS | launch._OPTIONS),
        ("again", (7, 1, 1), (Y, 6, 64, True)),
    ]


@pytest.mark.parametrize(
    "other", [("another", {}, X), ("kind", {"num_warps": 8}, X), ("kind", {}, torch.zeros(4))], ids=str
)
def test_another_kind_and_a_tensor_of_a_processor_are_looked_at(kernel: Kernel, other: tuple[Any, ...]) -> None:
    launcher, (kind, changes, x) = Launcher(kernel), other
    launcher((2, 3), (X, 5), CONSTANTS, "kind")
    launcher((2, 3), (x, 5), CONSTANTS | changes, kind)
    assert [entry[0] for entry in kernel.log] == ["looked", "looked"]


def test_unusual_calls_old_versions_and_other_vendors_are_always_looked_at(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    launchers = [(Launcher(kernel), None)]
    with monkeypatch.context() as patched:
        patched.setattr(triton, "__version__", "3.2.0")
        launchers.append((Launcher(kernel), "kind"))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    for launcher, kind in [*launchers, (Launcher(kernel), "kind")]:
        for _ in range(2):
            launcher((1, 1), (X, 5), CONSTANTS, kind)
    assert [entry[0] for entry in kernel.log] == ["looked"] * 6


def test_no_more_variants_are_kept_than_are_asked_for(kernel: Kernel) -> None:
    launcher = Launcher(kernel)
    for kind in range(3 * launch._MOST):
        launcher((1, 1), (X, 5), CONSTANTS, kind)
    assert len(launcher._variants) <= launch._MOST


def test_addresses_that_vectors_cannot_be_read_from_are_seen() -> None:
    numbers = torch.zeros(64, dtype=torch.float16)
    assert launch.aligned(numbers, None, numbers[8:])
    assert not launch.aligned(numbers, numbers[1:])


def test_a_grid_has_up_to_three_extents(kernel: Kernel) -> None:
    launcher = Launcher(kernel)
    for grid in ((5,), (5, 6), (5, 6, 7)):
        for _ in range(2):
            launcher(grid, (X, 5), CONSTANTS, grid)
    assert [entry[1] for entry in kernel.log if entry[0] == "again"] == [(5, 1, 1), (5, 6, 1), (5, 6, 7)]
