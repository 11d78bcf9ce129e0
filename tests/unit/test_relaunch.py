"""A launch of which tensors alone change is handed addresses, once its variant is known on the device at work."""

from __future__ import annotations

from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", minversion="3.6", reason="Gluon and knobs came with Triton 3.6")

from adaattn_hf.backends.launcher import _OPTIONS, Launcher  # noqa: E402  (imports triton)
from adaattn_hf.backends.relaunch import Relaunch, Variant  # noqa: E402

from ..support import c_launcher  # noqa: E402
from ..support.on_device import Devices, Kernel, OnSecond  # noqa: E402

TABLE = torch.zeros(4, dtype=torch.int32).as_subclass(OnSecond)
X = torch.zeros(4).as_subclass(OnSecond)
CONSTANTS = {"num_warps": 4, "CAUSAL": True, "BLOCK": 64}


class Compiled:
    """One whose launcher in C is not found."""

    run = c_launcher.Other()

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.log.append(("prepared", grid))
        return lambda *arguments, stream: self.log.append(("again", arguments, stream))


KINDS = {
    "x": "*fp32", "tiles": "tensordesc", "table": "*i32", "n": "i32", "BLOCK": "constexpr", "CAUSAL": "constexpr",
}  # fmt: skip


def in_c(log: list[Any]) -> c_launcher.Compiled:
    """One whose launcher in C is found, and takes a tensor by its descriptor, too."""
    return c_launcher.Compiled(log, c_launcher.Flat(), KINDS)


def by_tiles(kernel: Kernel) -> Relaunch:
    variant = Variant(Launcher(kernel), (5,), CONSTANTS, "kind", {1: c_launcher.Form()})
    return Relaunch(variant, (2, 3), (TABLE,))


def made() -> Kernel:
    return Kernel(("x", "table", "n", "BLOCK", "CAUSAL"), Compiled)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Devices:
    """Two of them; the tables' one is current."""
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    return Devices(monkeypatch, current=1)


def relaunch(kernel: Kernel, launcher: Launcher | None = None) -> Relaunch:
    return Relaunch(Variant(launcher or Launcher(kernel), (5,), CONSTANTS, "kind"), (2, 3), (TABLE,))


def test_the_first_launch_is_looked_at_and_the_others_are_given_addresses(device: Devices) -> None:
    kernel, x = made(), X
    again = relaunch(kernel)
    for _ in range(3):
        again((x,), (x.data_ptr(),))
    launched = ("again", (x.data_ptr(), TABLE.data_ptr(), 5, 64, True), 100)
    assert kernel.log == [
        ("looked", (2, 3), (x, TABLE, 5), CONSTANTS | _OPTIONS), ("prepared", (2, 3, 1)), launched, launched,
    ]  # fmt: skip


def test_a_variant_that_another_launch_has_found_is_known(device: Devices) -> None:
    kernel = made()
    launcher = Launcher(kernel)
    launcher((9,), (X, TABLE, 7), CONSTANTS, "kind")
    relaunch(kernel, launcher)((X,), (1 << 40,))
    assert [entry[0] for entry in kernel.log] == ["looked", "prepared", "again"]


def test_a_launch_goes_to_the_device_of_its_tables_whichever_is_current(device: Devices) -> None:
    kernel, x = made(), X
    again = relaunch(kernel)
    for device.current in (1, 0, 1, 0):
        was = device.current
        again((x,), (x.data_ptr(),))
        assert device.current == was
    assert [entry[0] for entry in kernel.log] == ["looked", "prepared", "again", "again", "again"]
    assert {entry[2] for entry in kernel.log if entry[0] == "again"} == {100}
    assert device.entered == [1, 1]  # where it was current already, nothing was entered


def test_a_version_of_triton_that_is_not_passed_by_looks_every_time(
    device: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "__version__", "3.2.0")
    kernel = made()
    again = relaunch(kernel)
    for _ in range(3):
        again((X,), (1 << 40,))
    assert [entry[0] for entry in kernel.log] == ["looked"] * 3


def test_without_a_kind_triton_looks_each_time(device: Devices) -> None:
    """Where an address may lie anywhere, what an earlier launch was compiled for need not hold."""
    kernel = made()
    again = Relaunch(Variant(Launcher(kernel), (5,), CONSTANTS, None), (2, 3), (TABLE,))
    for _ in range(3):
        again((X,), (1 << 40,))
    assert [entry[0] for entry in kernel.log] == ["looked"] * 3


def test_descriptors_are_made_where_triton_asks_for_them(device: Devices) -> None:
    kernel = Kernel(tuple(KINDS), Compiled)
    again = by_tiles(kernel)
    for _ in range(2):
        again((X, X), (X.data_ptr(),) * 2)
    (_, _, looked, _), _, (_, passed, _) = kernel.log
    assert [looked[0] is X, passed[0]] == [True, X.data_ptr()]
    for tiles in (looked[1], passed[1]):
        assert isinstance(tiles, c_launcher.Described)
        assert tiles.base is X


def test_launches_of_a_variant_differ_in_grid_tables_and_last_arguments(
    device: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer of a plan has its own, and a prompt of a new length waits for all of them."""
    read = c_launcher.note_reads(monkeypatch)
    kernel = Kernel(tuple(KINDS), in_c)
    variant = Variant(Launcher(kernel), (), CONSTANTS, "kind", {1: c_launcher.Form()})
    other = torch.zeros(4, dtype=torch.int32).as_subclass(OnSecond)
    first, second = Relaunch(variant, (2, 3), (TABLE,), (7,)), Relaunch(variant, (4,), (other,), (8,))
    for again in (first, second, first):
        again((X, X), (X.data_ptr(),) * 2)
    looked, *_ = kernel.log
    assert looked[2][2:] == (TABLE, 7)
    in_turn = [(passed[:3], passed[-4:]) for passed in kernel.log if isinstance(passed[0], int)]
    assert in_turn == [
        ((4, 1, 1), (other.data_ptr(), 8, 64, True)), ((2, 3, 1), (TABLE.data_ptr(), 7, 64, True)),
    ]  # fmt: skip
    assert len(read) == 1


def test_a_launcher_in_c_is_called_past_triton(device: Devices) -> None:
    kernel = Kernel(tuple(KINDS), in_c)
    again = by_tiles(kernel)
    x, y = X, torch.zeros(4).as_subclass(OnSecond)
    again((x, x), (x.data_ptr(),) * 2)
    for device.current in (1, 0):
        for one in (x, y):
            at = one.data_ptr()
            again((x, one), (x.data_ptr(), at))
            told, rest = (None, None, (4, 1, 0), None, None, None), (TABLE.data_ptr(), 5, 64, True)
            tiles = c_launcher.PyCUtensorMap(at), 4, 1
            assert kernel.log[-1] == (2, 3, 1, 100, 5, *told, x.data_ptr(), *tiles, *rest)
    assert len(kernel.log) == 5
    assert device.entered == [1, 1]


def test_whoever_asked_triton_to_be_called_at_launches_is(device: Devices) -> None:
    kernel, chain = Kernel(tuple(KINDS), in_c), triton.knobs.runtime.launch_enter_hook
    again = by_tiles(kernel)
    told = []
    for asked in (False, False, True, False):
        if asked:
            chain.add(print)
        again((X, X), (X.data_ptr(),) * 2)
        chain.remove(print)
        told.append("enter" in kernel.log[-1])
    assert told == [False, False, True, False]
