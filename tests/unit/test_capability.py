"""What a device can do is one record, and what it cannot do is refused by name."""

from types import SimpleNamespace

import pytest
import torch

from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.kind import HEAD_INT8
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends import capability as capability_module
from adaattn_hf.backends.capability import of_level, of_sm
from adaattn_hf.backends.native import library
from adaattn_hf.backends.select import refusals_of

from ..support.on_device import told_of

X = torch.zeros(1, 2, 8, 16)
KIND = AttentionCall(X, X, X, MaskStructure(1, 8, 8, causal=True), 0.25).checked_kind()


@pytest.mark.parametrize(("sm", "bf16", "fp8", "int8", "tiles", "kib"), [
    ((7, 0), False, False, False, False, 96), ((7, 5), False, False, True, False, 64),
    ((8, 0), True, False, True, False, 163), ((8, 9), True, True, True, False, 99),
    ((9, 0), True, True, True, True, 227), ((12, 0), True, True, True, True, 99),
    ((13, 0), True, True, True, True, 48),
])  # fmt: skip
def test_cuda_devices(sm: tuple[int, int], bf16: bool, fp8: bool, int8: bool, tiles: bool, kib: int) -> None:
    found = of_sm(sm)
    assert found.sm == sm
    assert (found.bf16, found.fp8, found.int8, found.tiles) == (bf16, fp8, int8, tiles)
    assert found.shared_memory == kib * 1024
    assert f"{kib} KiB" in found.words()


def test_the_device_that_is_current_now_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for current, sm in enumerate(((9, 0), (7, 5))):
        told_of(monkeypatch, (9, 0), (7, 5), current=current)
        assert capability_module.capability() == capability_module.capability(torch.device("cuda")) == of_sm(sm)
        assert capability_module.capability(1) == of_sm((7, 5))
    told_of(monkeypatch, (9, 0), hip="6.4")
    assert capability_module.capability() is None, "a device of another vendor"


@pytest.mark.filterwarnings("error")
def test_a_traced_graph_looks_into_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch warns of a cached function that it traces, in every program that compiles a model."""
    told_of(monkeypatch, (9, 0))

    def kib(x: torch.Tensor) -> torch.Tensor:
        found = capability_module.capability(0)
        return x if found is None else x + found.shared_memory // 1024

    torch._dynamo.reset()
    assert int(torch.compile(kib, backend="eager", fullgraph=True)(torch.zeros(()))) == 227


LEVELS = [
    ("portable", False, False), ("avx2", False, False), ("avx512", False, False), ("avx512_bf16", True, False),
    ("amx", True, True), ("neon", False, False),
]  # fmt: skip


@pytest.mark.parametrize(("level", "half", "tiles"), LEVELS)
def test_processors(level: str, half: bool, tiles: bool) -> None:
    found = of_level(level)
    assert (found.sm, found.shared_memory) == ((0, 0), 0)
    assert (found.bf16, found.int8, found.tiles, found.fp8) == (half, half, tiles, False)


def test_every_level_of_the_library_is_in_the_table_above() -> None:
    assert {level for level, _, _ in LEVELS} == set(library.LEVELS)


@pytest.mark.parametrize(("backend", "sm", "reason"), [
    ("fa2", (7, 5), "flash-attn has no kernels for compute capability 7.5"), ("fa2", (9, 0), ""),
    ("fa3", (8, 0), "flash-attn 3 has no kernels for compute capability 8.0"),
    ("fa3_fwd", (10, 0), "fa3-fwd has no kernels for compute capability 10.0"), ("fa3_fwd", (9, 0), ""),
    *(("fa4", sm, f"flash-attn 4 has no kernels for compute capability {sm[0]}.{sm[1]}") for sm in ((8, 9), (12, 0))),
    ("fa4", (9, 0), ""), ("fa4", (10, 0), ""),
    ("triton", (7, 5), "from compute capability 8.0 on, got 7.5"), ("triton", (8, 0), ""),
])  # fmt: skip
def test_what_a_cuda_device_cannot_do_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, backend: str, sm: tuple[int, int], reason: str
) -> None:
    monkeypatch.setattr(capability_module, "capability", lambda _: of_sm(sm))
    kind = KIND._replace(device=torch.device("cuda"), dtype=torch.bfloat16)
    of_the_device = [r for r in refusals_of(backend, kind) if "installed" not in r]
    assert bool(of_the_device) is bool(reason)
    assert all(reason in r for r in of_the_device)


@pytest.mark.parametrize(("level", "served"), [("avx2", False), ("avx512_bf16", True), ("amx", True)])
def test_what_a_processor_cannot_do_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, level: str, served: bool
) -> None:
    monkeypatch.setattr(library, "library", lambda: SimpleNamespace(level_name=level))
    monkeypatch.setattr(library, "missing", lambda: ())
    reasons = refusals_of("native", KIND._replace(features=HEAD_INT8))
    assert (reasons == ()) is served
    assert served or f"at level avx512_bf16 or amx, this processor runs {level}" in reasons[0]
