"""Tiles follow the shared memory of the device; where none fits the backend says so, and `auto` takes another."""

from typing import Any

import pytest
import torch

from adaattn_hf.attention.request import AttentionRequest
from adaattn_hf.attention.structure import CallStructure
from adaattn_hf.backends import capability as capability_module
from adaattn_hf.backends import select
from adaattn_hf.backends.capability import of_sm, shared_memory
from adaattn_hf.backends.triton import TritonBackend
from adaattn_hf.backends.triton.sizes import SIZES, Tile, tile_of

X = torch.zeros(1, 2, 8, 128)
SPEC = (
    AttentionRequest(X, X, X, CallStructure(1, 8, 8, causal=True), 0.25)
    .checked_kind()
    ._replace(device=torch.device("cuda"), dtype=torch.bfloat16)
)
HOPPER = of_sm((9, 0)).shared_memory
SERVED = [(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1)]

# As they were measured to be fastest on Hopper, by bytes of a padded head.
MEASURED = {
    "forward": {128: Tile(128, 64, 8, 3), 256: Tile(64, 64, 4, 3), 512: Tile(64, 32, 4, 2)},
    "forward of windows": {128: Tile(64, 64, 4, 3), 256: Tile(64, 64, 4, 3), 512: Tile(64, 32, 4, 2)},
    "of_keys": {128: Tile(64, 128, 8, 3), 256: Tile(64, 128, 8, 3), 512: Tile(32, 64, 8, 2)},
    "of_keys of runs": {128: Tile(64, 64, 4, 2), 256: Tile(64, 64, 4, 2), 512: Tile(32, 64, 8, 2)},
    "of_queries": {128: Tile(64, 64, 4, 2), 256: Tile(64, 64, 4, 2), 512: Tile(64, 32, 8, 2)},
    "decode": {256: Tile(1, 64, 4, 3), 512: Tile(1, 32, 4, 3), 1024: Tile(1, 32, 4, 3)},
    "decode_codes 8": {256: Tile(1, 128, 4, 3), 512: Tile(1, 64, 2, 2), 1024: Tile(1, 64, 2, 2, halves=True)},
    "decode_codes 4": {
        256: Tile(1, 128, 4, 3, 168), 512: Tile(1, 64, 2, 2), 1024: Tile(1, 64, 2, 2, halves=True),
    },
}  # fmt: skip


@pytest.mark.parametrize("kernel", SIZES)
def test_hopper_has_the_tiles_that_were_measured_there(kernel: str) -> None:
    for width, tile in MEASURED[kernel].items():
        assert tile_of(kernel, width, HOPPER) == tile_of(kernel, width // 2 + 1, HOPPER) == tile
    if "decode" in kernel:
        assert tile_of(kernel, 512, HOPPER, rows=64) == MEASURED[kernel][512]


@pytest.mark.parametrize("sm", SERVED)
@pytest.mark.parametrize("kernel", SIZES)
def test_every_device_since_ampere_has_a_tile_for_every_head(kernel: str, sm: tuple[int, int]) -> None:
    for width in MEASURED[kernel]:
        assert tile_of(kernel, width, of_sm(sm).shared_memory) is not None


@pytest.mark.parametrize(
    ("kernel", "width", "memory", "tile"),
    [
        ("of_keys", 256, 163, Tile(64, 64, 4, 2)), ("of_keys", 256, 99, Tile(64, 64, 4, 2)),
        ("of_keys", 512, 163, Tile(32, 64, 8, 2)), ("of_keys", 512, 99, Tile(32, 32, 8, 2)),
        ("of_queries", 512, 99, Tile(32, 32, 4, 2)), ("decode", 1024, 99, Tile(1, 32, 4, 2)),
        ("decode_codes 8", 512, 99, Tile(1, 64, 2, 2, halves=True)), ("forward", 256, 48, None),
    ],
)  # fmt: skip
def test_less_memory_has_smaller_tiles(kernel: str, width: int, memory: int, tile: Tile | None) -> None:
    assert tile_of(kernel, width, memory << 10) == tile


def test_heads_that_share_keys_take_memory() -> None:
    assert tile_of("decode", 1024, 99 << 10, rows=16) == Tile(1, 32, 4, 2)
    assert tile_of("decode", 1024, 99 << 10, rows=32) == Tile(1, 16, 4, 2)
    assert tile_of("decode", 1024, 99 << 10, rows=128) is None
    assert tile_of("decode", 1024, HOPPER, rows=128) == Tile(1, 32, 4, 2)


def refused(monkeypatch: pytest.MonkeyPatch, sm: tuple[int, int], **changes: Any) -> tuple[str, ...]:
    monkeypatch.setattr(capability_module, "capability", lambda _: of_sm(sm))
    return TritonBackend().refusals(SPEC._replace(**changes))


@pytest.mark.parametrize("sm", SERVED)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"needs_grad": True, "kind": "ragged", "holes": False},
        {"needs_grad": True, "head_dim": 256, "head_dim_v": 256},
        {"decode": True, "dtype": torch.float32, "head_dim": 256, "head_dim_v": 256, "groups": 8},
        {"decode": True, "stored": "int8", "head_dim": 256, "head_dim_v": 256, "groups": 8},
    ],
)
def test_devices_since_ampere_are_served(
    monkeypatch: pytest.MonkeyPatch, sm: tuple[int, int], changes: dict[str, Any]
) -> None:
    assert refused(monkeypatch, sm, **changes) == ()


@pytest.mark.parametrize(
    ("sm", "changes", "kernel"),
    [
        ((13, 0), {}, "'forward' for heads of 128 channels in torch.bfloat16"),
        ((13, 0), {"needs_grad": True}, "'of_queries'"),
        (
            (8, 6),
            {"decode": True, "dtype": torch.float32, "head_dim": 256, "groups": 71},
            "'decode' for heads of 256 channels in torch.float32, 71 of which share keys,",
        ),
        ((8, 6), {"decode": True, "stored": "k8v4", "head_dim": 256, "groups": 64}, "'decode_codes 4'"),
    ],
)
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
    monkeypatch.setattr(select, "_missing", lambda name: ("not here",) if name.startswith("fa") else ())
    monkeypatch.setattr(select, "launches", {})
    packed = SPEC._replace(kind="ragged", holes=False, needs_grad=True)
    for sm, name in (((8, 6), "triton"), ((13, 0), "sdpa")):
        monkeypatch.setattr(capability_module, "capability", lambda _, sm=sm: of_sm(sm))
        select.launches.clear()
        assert select.choose(packed).name == name


def test_where_nothing_is_known_tiles_are_those_of_hopper() -> None:
    assert shared_memory(torch.device("cpu")) == HOPPER
