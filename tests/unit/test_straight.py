"""A launch past Triton's Python passes in C what Triton would, with descriptors that were encoded before."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", minversion="3.6", reason="Gluon and knobs came with Triton 3.6")

from triton.backends.nvidia import driver  # noqa: E402

from adaattn_hf.backends import straight  # noqa: E402  (imports triton)

from ..support import c_launcher  # noqa: E402
from ..support.c_launcher import Compiled, Flat, Form, Other, PyCUtensorMap, Together  # noqa: E402

KINDS = {
    "query": "*bf16", "keys": "tensordesc", "values": "tensordesc", "out": "*bf16", "table": "*i32", "scale": "fp32",
    "ONE": "constexpr",
}  # fmt: skip
REST = (1 << 40, 0.5, 1)
GRID = (132, 1, 1)
Made = Callable[[list[Any], dict[str, str]], Compiled]


def drawn() -> tuple[Tensor, ...]:
    return tuple(torch.zeros(6, 8, dtype=torch.bfloat16) for _ in range(4))


def of_tiles() -> straight.Described:
    return {1: Form(), 2: Form()}


def addresses(tensors: tuple[Tensor, ...]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The addresses of which descriptors were encoded."""
    found: list[int] = []

    def fill(address: int, *_rest: Any) -> PyCUtensorMap:
        found.append(address)
        return PyCUtensorMap(address)

    utils = SimpleNamespace(fill_tma_descriptor=fill, fill_tma_descriptor_tiled=fill)
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(utils=utils))
    monkeypatch.setattr(driver, "PyCUtensorMap", PyCUtensorMap)
    monkeypatch.setattr(c_launcher, "encode", fill)
    return found


def installed(log: list[Any], signature: dict[str, str]) -> Compiled:
    """With the launcher of the Triton that is installed."""
    run = object.__new__(driver.CudaLauncher)
    vars(run).update(
        num_ctas=1, global_scratch_align=1, profile_scratch_align=1, launch_cooperative_grid=False, launch_pdl=False,
        gsan_enabled=False, arg_annotations="annotated", kernel_signature=b"signed",
    )  # fmt: skip
    return Compiled(log, run, signature, driver.wrap_handle_tensordesc)


def of_3_6(log: list[Any], signature: dict[str, str]) -> Compiled:
    return Compiled(log, Flat(), signature)


def of_3_7(log: list[Any], signature: dict[str, str]) -> Compiled:
    return Compiled(log, Together(), signature)


def straight_of(
    compiled: Compiled,
    grid: tuple[int, ...],
    tensors: tuple[Tensor, ...],
    rest: tuple[Any, ...],
    described: straight.Described,
) -> straight.Straight:
    """Of a kernel that has a launcher in C."""
    passed = straight.passed_of(compiled, tensors, len(rest), described)
    assert passed is not None
    return straight.Straight(passed, grid, rest)


ALL = pytest.mark.parametrize("make", [installed, of_3_6, of_3_7])


def without_hooks(passed: tuple[Any, ...]) -> list[Any]:
    """What is passed in C, but hooks and what they are told."""
    shown = [one for one in passed if one not in (None, "told", "enter", "leave")]
    return [list(one) if isinstance(one, tuple) and one != Compiled.packed_metadata else one for one in shown]


@ALL
@pytest.mark.parametrize("described", [of_tiles(), {}], ids=["descriptors", "addresses alone"])
def test_passes_what_triton_passes(make: Made, encoded: list[int], described: straight.Described) -> None:
    log: list[Any] = []
    kinds = (
        KINDS if described else {name: kind.replace("tensordesc", "*bf16") for name, kind in KINDS.items()}
    )
    compiled = make(log, kinds)
    assert straight.launcher_in_c(compiled, len(described)) is not None
    sets = [drawn() for _ in range(3)]
    again = straight_of(compiled, GRID, sets[0], REST, described)
    for _ in range(2):
        for tensors in sets:
            at = addresses(tensors)
            arguments = straight.with_descriptors(described, tensors, at)
            compiled[GRID](*arguments, *REST, stream=70)
            again(70, tensors, at)
            by_triton, past = log[-2:]
            assert without_hooks(by_triton) == without_hooks(past)
            assert len(by_triton) == len(past)
            assert not {"told", "enter", "leave"} & {one for one in past if isinstance(one, str)}


@ALL
def test_another_stream_is_heard(make: Made, encoded: list[int]) -> None:
    log: list[Any] = []
    tensors = drawn()
    again = straight_of(make(log, KINDS), GRID, tensors, REST, of_tiles())
    for stream in (70, 71, 0):
        again(stream, tensors, addresses(tensors))
    assert [passed[3] for passed in log] == [70, 71, 0]


@ALL
def test_launches_share_no_arguments(make: Made, encoded: list[int]) -> None:
    """Two threads may launch at once: what one has put together is not changed by the other."""
    log: list[Any] = []
    sets = [drawn() for _ in range(3)]
    again = straight_of(make(log, KINDS), GRID, sets[0], REST, of_tiles())
    for tensors in sets:
        again(70, tensors, addresses(tensors))
    passed = [one[-1] if isinstance(one[-1], list) else one for one in log]
    assert all(tensors[0].data_ptr() in one for tensors, one in zip(sets, passed, strict=True))


@ALL
def test_an_address_is_encoded_once(make: Made, encoded: list[int]) -> None:
    tensors, others = drawn(), drawn()
    again = straight_of(make([], KINDS), GRID, tensors, REST, of_tiles())
    del encoded[:]
    for _ in range(3):
        again(70, tensors, addresses(tensors))
        again(70, others, addresses(others))
    assert encoded == [one[place].data_ptr() for one in (tensors, others) for place in (1, 2)]
    mixed = (tensors[0], tensors[1], others[2], tensors[3])
    del encoded[:]
    again(70, mixed, addresses(mixed))
    assert not encoded


@ALL
def test_an_address_is_encoded_once_for_all_kernels_with_the_same_tiles(
    make: Made, encoded: list[int]
) -> None:
    """Layers with windows of their own launch variants and tables of their own, over keys at the same places."""
    tensors, described = drawn(), of_tiles()
    first, second = (straight_of(make([], KINDS), GRID, tensors, REST, described) for _ in range(2))
    first(70, tensors, addresses(tensors))
    del encoded[:]
    second(70, tensors, addresses(tensors))
    assert not encoded


@ALL
def test_launches_that_differ_in_grid_and_tables_are_read_off_once(
    make: Made, encoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer of a plan has its own, and a prompt of a new length waits for all of them."""
    read = c_launcher.note_reads(monkeypatch)
    log: list[Any] = []
    compiled, tensors, described = make(log, KINDS), drawn(), of_tiles()
    for grid, rest in ((GRID, REST), ((7, 3, 1), (1 << 41, 0.5, 1)), (GRID, (1 << 42, 0.25, 1))):
        again = straight_of(compiled, grid, tensors, rest, described)
        at = addresses(tensors)
        compiled[grid](*straight.with_descriptors(described, tensors, at), *rest, stream=70)
        again(70, tensors, at)
        by_triton, past = log[-2:]
        assert without_hooks(by_triton) == without_hooks(past)
    assert read == [2]
    straight_of(compiled, GRID, tensors, REST, of_tiles())  # of tensors of another shape
    straight_of(make([], KINDS), GRID, tensors, REST, described)
    assert read == [2, 2, 2]


def test_a_kernel_without_a_launcher_in_c_is_left_to_triton() -> None:
    compiled = Compiled([], Other(), KINDS)
    assert straight.passed_of(compiled, drawn(), len(REST), of_tiles()) is None


def test_no_more_addresses_are_kept_than_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, encoded: list[int]
) -> None:
    monkeypatch.setattr(straight, "_MOST", 4)
    log: list[Any] = []
    first, *sets = [drawn() for _ in range(11)]
    again = straight_of(of_3_6(log, KINDS), GRID, first, REST, of_tiles())
    for tensors in sets:
        again(70, tensors, addresses(tensors))
        assert [one for one in log[-1] if isinstance(one, PyCUtensorMap)] == [
            PyCUtensorMap(tensors[place].data_ptr()) for place in (1, 2)
        ]
    assert all(len(kept) <= 4 for _, _, kept in again._passed.maps)


@ALL
def test_keeps_no_tensor(make: Made, encoded: list[int]) -> None:
    tensors = drawn()
    again = straight_of(make([], KINDS), GRID, tensors, REST, of_tiles())
    again(70, tensors, addresses(tensors))
    kept = [weakref.ref(tensor) for tensor in tensors]
    gc.disable()
    try:
        del tensors
        assert [one() for one in kept] == [None] * 4
    finally:
        gc.enable()


@ALL
@pytest.mark.parametrize(
    "odd",
    ["memory of its own", "memory of a profiler", "instrumented", "taken apart", "not wrapped so", "fewer"],
)
def test_what_is_made_otherwise_is_left_to_triton(make: Made, encoded: list[int], odd: str) -> None:
    compiled = make([], KINDS)
    if odd == "memory of its own":
        compiled.run.global_scratch_size = 8
    elif odd == "memory of a profiler":
        compiled.run.profile_scratch_size = 8
    elif odd == "instrumented":
        compiled.run.gsan_enabled = True
    elif odd == "taken apart":  # as on devices without a copy engine
        compiled.metadata.tensordesc_meta = [*compiled.metadata.tensordesc_meta[:1], None]
    elif odd == "not wrapped so":
        compiled.run.launch = lambda *passed: None
    assert straight.launcher_in_c(compiled, 1 if odd == "fewer" else 2) is None


def test_launchers_that_take_something_else_are_left_to_triton() -> None:
    assert straight.launcher_in_c(Compiled([], Other(), KINDS), 2) is None


def test_a_driver_that_wraps_nothing_is_left_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = of_3_6([], KINDS)
    monkeypatch.delattr(c_launcher, "wrap_handle_tensordesc")
    assert straight.launcher_in_c(compiled, 2) is None


@pytest.mark.parametrize("which", ["launch_enter_hook", "launch_exit_hook"])
def test_whoever_asked_to_be_called_is_seen(monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    runtime = triton.knobs.runtime
    assert not straight.watched()
    chain = getattr(runtime, which)
    chain.add(print)
    assert straight.watched()
    chain.remove(print)
    assert not straight.watched()
    monkeypatch.setattr(runtime, which, None)
    assert not straight.watched()
    monkeypatch.setattr(runtime, which, print)
    assert straight.watched()
