"""A variant that was launched is launched again without Triton; on a device `tests/gpu` compares what comes out."""

from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from adaattn_hf.backends.triton import launcher  # noqa: E402  (imports triton)

from ..support.on_device import Devices, Kernel, OnSecond  # noqa: E402

X, Y, Z = torch.zeros(4), torch.ones(4), torch.zeros(4).as_subclass(OnSecond)


class Compiled:
    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.log.append(("again", grid, arguments))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    return Kernel(("x", "n", "BLOCK", "CAUSAL"), Compiled)


def test_the_second_launch_of_a_kind_passes_triton_by(kernel: Kernel) -> None:
    launch = launcher.Launcher(kernel)
    constants = {"num_warps": 4, "CAUSAL": True, "BLOCK": 64}
    launch((2, 3), (X, 5), constants, "kind")
    launch((7, 1), (Y, 6), constants, "kind")
    assert kernel.log == [
        ("looked", (2, 3), (X, 5), constants | launcher._OPTIONS),
        ("again", (7, 1, 1), (Y, 6, 64, True)),
    ]


@pytest.mark.parametrize(
    "other",
    [{"kind": "another"}, {"constants": {"num_warps": 8, "CAUSAL": True, "BLOCK": 64}}, {"x": Z}],
    ids=["kind", "constants", "device"],
)
def test_another_kind_is_looked_at(kernel: Kernel, monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]) -> None:
    launch = launcher.Launcher(kernel)
    constants = {"num_warps": 4, "CAUSAL": True, "BLOCK": 64}
    launch((2, 3), (X, 5), constants, "kind")
    Devices(monkeypatch)
    launch((2, 3), (other.get("x", X), 5), other.get("constants", constants), other.get("kind", "kind"))
    assert [entry[0] for entry in kernel.log] == ["looked", "looked"]


def test_unusual_calls_old_versions_and_other_vendors_are_always_looked_at(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = launcher.Launcher(kernel)
    for _ in range(2):
        launch((1, 1), (X, 5), {"BLOCK": 64, "CAUSAL": True}, None)
    with monkeypatch.context() as patched:
        patched.setattr(triton, "__version__", "3.2.0")
        old = launcher.Launcher(kernel)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    for launch in (old, launcher.Launcher(kernel)):
        for _ in range(2):
            launch((1, 1), (X, 5), {"BLOCK": 64, "CAUSAL": True}, "kind")
    assert [entry[0] for entry in kernel.log] == ["looked"] * 6


def test_no_more_variants_are_kept_than_are_asked_for(kernel: Kernel) -> None:
    launch = launcher.Launcher(kernel)
    for kind in range(3 * launcher._MOST):
        launch((1, 1), (X, 5), {"BLOCK": 64, "CAUSAL": True}, kind)
    assert len(launch._variants) <= launcher._MOST


def test_addresses_that_vectors_cannot_be_read_from_are_seen() -> None:
    numbers = torch.zeros(64, dtype=torch.float16)
    assert launcher.aligned(numbers, None, numbers[8:])
    assert not launcher.aligned(numbers, numbers[1:])


def test_a_grid_has_up_to_three_extents(kernel: Kernel) -> None:
    launch, constants = launcher.Launcher(kernel), {"BLOCK": 64, "CAUSAL": True}
    for grid in ((5,), (5, 6), (5, 6, 7)):
        for _ in range(2):
            launch(grid, (X, 5), constants, grid)
    assert [entry[1] for entry in kernel.log if entry[0] == "again"] == [(5, 1, 1), (5, 6, 1), (5, 6, 7)]
