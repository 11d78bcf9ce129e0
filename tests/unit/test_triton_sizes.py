"""What the Triton kernels need: tiles that fit the shared memory of a device, and a compiler before a launch."""

import os
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.kind import GRAD, LOOKED, ONE_QUERY, STORED
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends import capability as capability_module
from adaattn_hf.backends import select
from adaattn_hf.backends.capability import of_sm
from adaattn_hf.backends.triton import TritonBackend
from adaattn_hf.backends.triton.backend import cannot_build
from adaattn_hf.backends.triton.tiling import SIZES, tile_of

X = torch.zeros(1, 2, 8, 128)
KIND = (
    AttentionCall(X, X, X, MaskStructure(1, 8, 8, causal=True), 0.25)
    .checked_kind()
    ._replace(device=torch.device("cuda"), dtype=torch.bfloat16)
)
HOPPER = of_sm((9, 0)).shared_memory
SERVED = [(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1)]


@pytest.mark.parametrize("sm", SERVED)
@pytest.mark.parametrize("kernel", SIZES)
def test_every_device_since_ampere_has_a_tile_for_every_head(kernel: str, sm: tuple[int, int]) -> None:
    for size in SIZES[kernel]:
        assert tile_of(kernel, size.width, of_sm(sm).shared_memory) is not None


def cut(kernel: str, width: int, memory: int, rows: int = 16) -> tuple[int, int] | None:
    tile = tile_of(kernel, width, memory, rows)
    return None if tile is None else (tile.rows, tile.columns)


def test_less_memory_has_smaller_tiles() -> None:
    assert cut("of_keys", 512, HOPPER) == (32, 64)
    assert cut("of_keys", 512, 99 << 10) == (32, 32)
    assert cut("forward", 256, 48 << 10) is None


def test_heads_that_share_keys_take_memory() -> None:
    assert cut("decode", 1024, 99 << 10, rows=16) == cut("decode", 1024, HOPPER, rows=128) == (1, 32)
    assert cut("decode", 1024, 99 << 10, rows=32) == (1, 16)
    assert cut("decode", 1024, 99 << 10, rows=128) is None


def refused(monkeypatch: pytest.MonkeyPatch, sm: tuple[int, int], **changes: Any) -> tuple[str, ...]:
    monkeypatch.setattr(capability_module, "capability", lambda _: of_sm(sm))
    groups = changes.pop("groups", 1)
    return TritonBackend().refusals(KIND._replace(heads=groups * KIND.kv_heads, **changes))


STEP: dict[str, Any] = {"features": ONE_QUERY, "head_dim": 256, "head_dim_v": 256}
CODES: dict[str, Any] = STEP | {"features": ONE_QUERY | STORED}


@pytest.mark.parametrize("sm", SERVED)
@pytest.mark.parametrize("changes", [
    {}, {"features": GRAD | LOOKED, "shape": "ragged"},
    {"features": GRAD, "head_dim": 256, "head_dim_v": 256}, STEP | {"dtype": torch.float32, "groups": 8},
    CODES | {"groups": 8},
])  # fmt: skip
def test_devices_since_ampere_are_served(
    monkeypatch: pytest.MonkeyPatch, sm: tuple[int, int], changes: dict[str, Any]
) -> None:
    assert refused(monkeypatch, sm, **changes) == ()


@pytest.mark.parametrize(("sm", "changes", "kernel"), [
    ((13, 0), {}, "'forward' for heads of 128 channels in torch.bfloat16"),
    ((13, 0), {"features": GRAD}, "'of_queries'"),
    ((8, 6), STEP | {"dtype": torch.float32, "groups": 71},
     "'decode' for heads of 256 channels in torch.float32, 71 of which share keys,"),
    ((8, 6), CODES | {"value_dtype": torch.uint8, "groups": 64}, "'decode_codes 4'"),
])  # fmt: skip
def test_what_no_tile_fits_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, sm: tuple[int, int], changes: dict[str, Any], kernel: str
) -> None:
    reasons = refused(monkeypatch, sm, **changes)
    kib = of_sm(sm).shared_memory >> 10
    assert any(
        reason.startswith(f"no tile of the Triton kernel {kernel}") and reason.endswith(f"{kib} KiB")
        for reason in reasons
    )
    assert refused(monkeypatch, (9, 0), **changes) == ()


def test_auto_takes_another_backend_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "missing", lambda name: ("not here",) if name.startswith("fa") else ())
    packed = KIND._replace(shape="ragged", features=GRAD | LOOKED)
    for sm, name in (((8, 6), "triton"), ((13, 0), "sdpa")):
        monkeypatch.setattr(capability_module, "capability", lambda _, sm=sm: of_sm(sm))
        assert select.choose(packed).name == name


def test_where_nothing_is_known_tiles_are_those_of_hopper() -> None:
    pytest.importorskip("triton")
    from adaattn_hf.backends.triton.launch import device_facts

    assert device_facts(torch.device("cpu")).memory == HOPPER


@pytest.fixture
def headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """As on a machine without compilers: where Python's headers would be."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    return tmp_path / "Python.h"


@pytest.mark.parametrize("found", ["gcc", "clang", "named by CC"])
def test_a_compiler_on_the_path_or_by_its_name_is_enough(
    found: str, headers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers.touch()
    if found == "named by CC":
        monkeypatch.setenv("CC", "tcc")
    else:
        monkeypatch.setattr(shutil, "which", lambda name: name if name == found else None)
    assert cannot_build() == ()


def test_without_compiler_and_headers_both_are_named(headers: Path) -> None:
    compiler, lacking = cannot_build()
    assert "install gcc, or set CC" in compiler
    assert f"no {headers}" in lacking


def test_without_a_compiler_the_backend_is_missing(headers: Path) -> None:
    pytest.importorskip("triton")
    headers.touch()
    (reason,) = select.by_name("triton").missing()
    assert "no C compiler" in reason


@pytest.mark.usefixtures("headers")
def test_windows_brings_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "name", "nt")
    assert cannot_build() == ()
