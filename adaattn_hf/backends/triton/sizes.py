"""Tile sizes of the kernels by what a device's programs may hold, and the score factor that the launches share."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from ...attention.kind import CallSpec
from ...attention.stored import BITS
from ..capability import shared_memory

LEAST_SM = (8, 0)
"""The compute capability from which on Triton multiplies on matrix units."""


class Tile(NamedTuple):
    """How a kernel cuts its work: query rows, key columns, warps, stages of its pipeline, most registers a thread.

    `halves`: whether queries are rotated by halves of their channels.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    registers: int | None = None
    halves: bool = False

    def constants(self) -> dict[str, int]:
        """As the kernels and Triton's compiler name them, but the registers."""
        return {
            "BLOCK_M": self.rows, "BLOCK_N": self.columns, "num_warps": self.warps, "num_stages": self.stages
        }  # fmt: skip


class Size(NamedTuple):
    """A tile, whom it serves and what it asks of a device.

    Attributes:
        width: Bytes of a padded head up to which it serves.
        memory: Bytes of shared memory that a program takes then, as compiled for devices that have less than Hopper
            (`make compiled` holds them to it); of a step, for up to 16 rows.
        more: Of a step, the bytes for each further row: query heads that share keys, up to a power of two.
    """

    width: int
    memory: int
    tile: Tile
    more: int = 0


_FOUR_WARPS = 227 << 10
"""What a device must have for a tile that only products of four warps together make good: Hopper and Blackwell's
datacentre devices have so much. For others the compiler keeps most of such a tile's sums in memory."""

_OVER_128 = (Size(256, 90_240, Tile(64, 64, 4, 3)), Size(512, 69_760, Tile(64, 32, 4, 2)))
_KEYS = (
    Size(128, 35_328, Tile(64, 64, 4, 2)),
    Size(256, 74_240, Tile(64, 64, 4, 2)),
    Size(512, 115_072, Tile(32, 64, 8, 2)),
    Size(512, 82_432, Tile(32, 32, 8, 2)),
)
_CODES = (
    Size(512, 147_456, Tile(1, 64, 2, 2), 1024),
    Size(512, 65_536, Tile(1, 64, 2, 2, halves=True), 2048),
    Size(1024, 98_304, Tile(1, 64, 2, 2, halves=True), 4096),
)

SIZES: dict[str, tuple[Size, ...]] = {
    # Two small programs per multiprocessor beat one large program. Heads of up to 64 channels without windows are the
    # exception: a block of queries of a narrow window reads few tiles, of which large ones hold more that nobody sees.
    "forward": (Size(128, 49_280, Tile(128, 64, 8, 3)), *_OVER_128),
    "forward of windows": (Size(128, 41_088, Tile(64, 64, 4, 3)), *_OVER_128),
    # the queries of a block of keys
    "of_keys": (Size(256, _FOUR_WARPS, Tile(64, 128, 8, 3)), *_KEYS),
    "of_keys of runs": _KEYS,
    # the keys of a block of queries
    "of_queries": (
        Size(128, 34_816, Tile(64, 64, 4, 2)),
        Size(256, 67_584, Tile(64, 64, 4, 2)),
        Size(512, 102_400, Tile(64, 32, 8, 2)),
        Size(512, 69_632, Tile(32, 32, 4, 2)),
    ),
    # one query: the stages stay in shared memory
    "decode": (
        Size(256, 73_792, Tile(1, 64, 4, 3), 516),
        Size(512, 75_840, Tile(1, 32, 4, 3), 644),
        Size(512, 25_664, Tile(1, 16, 4, 2), 580),
        Size(1024, 149_568, Tile(1, 32, 4, 3), 1156),
        Size(1024, 84_032, Tile(1, 32, 4, 2), 1156),
        Size(1024, 50_240, Tile(1, 16, 4, 2), 1092),
    ),
    # Over codes, by bits of a value and bytes of a query; each warp has 32 keys of its own. With 16, Triton 3.6 may lay
    # out the weights of a product as bytes, which is wrong in half precision.
    "decode_codes 8": (Size(256, 66_048, Tile(1, 128, 4, 3), 728), *_CODES),
    # 168: registers of three programs at once
    "decode_codes 4": (Size(256, 49_664, Tile(1, 128, 4, 3, 168), 874), *_CODES),
}
"""By kernel, best first as measured on an H200; where the first that serves does not fit, a smaller one follows."""


def tile_of(kernel: str, width: int, memory: int, rows: int = 16) -> Tile | None:
    """The tile of a kernel, by its name in `SIZES`, in the shared memory of a device's program; None where none fits.

    `width` is bytes of the largest padded head, `rows` a step's query heads that share keys, up to a power of two.
    """
    for size in SIZES[kernel]:
        if width <= size.width and size.memory + size.more * max(0, rows - 16) <= memory:
            return size.tile
    return None


@functools.cache
def tile_on(kernel: str, width: int, device: torch.device, rows: int = 16) -> Tile:
    """The same on a device; where none fits it raises, as the backend refuses such calls."""
    memory = shared_memory(device)
    tile = tile_of(kernel, width, memory, rows)
    if tile is None:
        raise ValueError(_said(kernel, f"heads of {width} bytes", memory))
    return tile


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a device; off CUDA, where kernels are interpreted, a few."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def refusals(spec: CallSpec, memory: int) -> list[str]:
    """What a call launches that does not fit a device whose programs may have so much shared memory."""
    pad = padded(max(spec.head_dim, spec.head_dim_v))
    heads = f"heads of {pad} channels in {spec.dtype}, {spec.groups} of which share keys,"
    return [
        _said(kernel, heads, memory)
        for kernel in _launched(spec)
        if tile_of(kernel, pad * spec.dtype.itemsize, memory, rows_of(spec.groups)) is None
    ]


def _launched(spec: CallSpec) -> tuple[str, ...]:
    if spec.decode and not spec.needs_grad:
        return ("decode" if spec.stored is None else f"decode_codes {BITS[spec.stored]}",)
    forward = ("forward", "forward of windows")
    return (*forward, "of_keys", "of_keys of runs", "of_queries") if spec.needs_grad else forward


def _said(kernel: str, what: str, memory: int) -> str:
    return (
        f"no tile of the Triton kernel {kernel!r} for {what} fits the shared memory of the device's programs, "
        f"{memory >> 10} KiB"
    )


def padded(dim: int) -> int:
    """Tile width for a head size: a power of two, at least 16."""
    return max(16, 1 << (dim - 1).bit_length())


def rows_of(groups: int, least: int = 16) -> int:
    """Rows of a step's products for so many query heads that share keys: a power of two."""
    return max(least, 1 << (groups - 1).bit_length())


def scale_of(scaling: float, softcap: float | None) -> float:
    """The factor on products of queries and keys; it includes log2(e) unless a softcap follows.

    Never 0, because -inf * 0 (a hidden key) is NaN; 1e-30 weighs all keys alike as well.
    """
    return float(scaling) if softcap is not None else (scaling or 1e-30) * 1.4426950408889634
