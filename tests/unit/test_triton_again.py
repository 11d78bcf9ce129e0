"""A variant that was launched is launched again without Triton; on a device `tests/gpu` compares what comes out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from adaattn_hf.backends.triton import again  # noqa: E402  (imports triton)


class Compiled:
    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.log.append(("again", grid, arguments))


class Kernel:
    """As `triton.jit` makes one: compiles with the first launch, and takes options that are no arguments."""

    arg_names = ("x", "n", "BLOCK", "CAUSAL")

    def __init__(self) -> None:
        self.log: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> Compiled:
            self.log.append(("looked", grid, arguments, constants))
            return Compiled(self.log)

        return launch


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    return Kernel()


def test_the_second_launch_of_a_kind_passes_triton_by(kernel: Kernel) -> None:
    launch = again.Launcher(kernel)
    constants = {"num_warps": 4, "CAUSAL": True, "BLOCK": 64}
    launch((2, 3), ("x", 5), constants, "kind")
    launch((7, 1), ("y", 6), constants, "kind")
    assert kernel.log == [
        ("looked", (2, 3), ("x", 5), constants),
        ("again", (7, 1, 1), ("y", 6, 64, True)),
    ]


@pytest.mark.parametrize(
    "other",
    [{"kind": "another"}, {"constants": {"num_warps": 8, "CAUSAL": True, "BLOCK": 64}}, {"device": 1}],
    ids=["kind", "constants", "device"],
)
def test_another_kind_is_looked_at(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    launch = again.Launcher(kernel)
    constants = {"num_warps": 4, "CAUSAL": True, "BLOCK": 64}
    launch((2, 3), ("x", 5), constants, "kind")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: other.get("device", 0))
    launch((2, 3), ("x", 5), other.get("constants", constants), other.get("kind", "kind"))
    assert [entry[0] for entry in kernel.log] == ["looked", "looked"]


def test_unusual_calls_old_versions_and_other_vendors_are_always_looked_at(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = again.Launcher(kernel)
    for _ in range(2):
        launch((1, 1), ("x", 5), {"BLOCK": 64, "CAUSAL": True}, None)
    with monkeypatch.context() as patched:
        patched.setattr(triton, "__version__", "3.2.0")
        old = again.Launcher(kernel)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    for launch in (old, again.Launcher(kernel)):
        for _ in range(2):
            launch((1, 1), ("x", 5), {"BLOCK": 64, "CAUSAL": True}, "kind")
    assert [entry[0] for entry in kernel.log] == ["looked"] * 6


def test_no_more_variants_are_kept_than_are_asked_for(kernel: Kernel) -> None:
    launch = again.Launcher(kernel)
    for kind in range(3 * again._MOST):
        launch((1, 1), ("x", 5), {"BLOCK": 64, "CAUSAL": True}, kind)
    assert len(launch._known) <= again._MOST


def test_addresses_that_vectors_cannot_be_read_from_are_seen() -> None:
    numbers = torch.zeros(64, dtype=torch.float16)
    assert again.aligned(numbers, None, numbers[8:])
    assert not again.aligned(numbers, numbers[1:])
