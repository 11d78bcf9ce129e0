"""How the kernels cut their work: tiles by what a device's programs may hold, and on Hopper by how warps share it out.

Nothing here imports Triton: the backend asks for tiles before it is known to be there.
"""

from typing import NamedTuple

from ...attention.kind import BITS, SOFTCAP, CallKind

LEAST_SM = (8, 0)
"""The compute capability from which on Triton multiplies on matrix units."""


class Tile(NamedTuple):
    """How a kernel cuts its work, for heads of up to `width` bytes (padded), and what that asks of a device.

    Attributes:
        memory: Bytes of shared memory that a program takes then, as compiled for devices that have less than Hopper
            (`make compiled` holds them to it); of a step, for up to 16 rows.
        rows, columns: Queries and keys of a tile.
        warps, stages: Of a program, and of its pipeline.
        registers: Most of a thread; None for no limit.
        sums: Whether queries are turned by sums and differences of their channels, without a matrix.
        more: Of a step, the bytes for each further row: query heads that share keys, up to a power of two.
    """

    width: int
    memory: int
    rows: int
    columns: int
    warps: int
    stages: int
    registers: int | None = None
    sums: bool = False
    more: int = 0

    def constants(self) -> dict[str, int]:
        """As the kernels and Triton's compiler name them, but the registers."""
        return {
            "BLOCK_M": self.rows, "BLOCK_N": self.columns, "num_warps": self.warps, "num_stages": self.stages
        }  # fmt: skip


_FOUR_WARPS = 227 << 10
"""What a device must have for a tile that only products of four warps together make good: Hopper and Blackwell's
datacentre devices have so much. For others the compiler keeps most of such a tile's sums in memory."""

_OVER_128 = (Tile(256, 90_240, 64, 64, 4, 3), Tile(512, 69_760, 64, 32, 4, 2))
_KEYS = (
    Tile(128, 35_328, 64, 64, 4, 2),
    Tile(256, 74_240, 64, 64, 4, 2),
    Tile(512, 115_072, 32, 64, 8, 2),
    Tile(512, 82_432, 32, 32, 8, 2),
)
_CODES = (
    Tile(512, 147_456, 1, 64, 2, 2, more=1024),
    Tile(512, 65_536, 1, 64, 2, 2, sums=True, more=2048),
    Tile(1024, 65_792, 1, 64, 2, 2, more=2048),
)

SIZES: dict[str, tuple[Tile, ...]] = {
    # Two small programs per multiprocessor beat one large program. Heads of up to 64 channels without windows are the
    # exception: a block of queries of a narrow window reads few tiles, of which large ones hold more that nobody sees.
    "forward": (Tile(128, 49_280, 128, 64, 8, 3), *_OVER_128),
    "forward of windows": (Tile(128, 41_088, 64, 64, 4, 3), *_OVER_128),
    # the queries of a block of keys
    "of_keys": (Tile(256, _FOUR_WARPS, 64, 128, 8, 3), *_KEYS),
    "of_keys of runs": _KEYS,
    # the keys of a block of queries
    "of_queries": (
        Tile(128, 34_816, 64, 64, 4, 2),
        Tile(256, 67_584, 64, 64, 4, 2),
        Tile(512, 102_400, 64, 32, 8, 2),
        Tile(512, 69_632, 32, 32, 4, 2),
    ),
    # one query: the stages stay in shared memory
    "decode": (
        Tile(256, 73_792, 1, 64, 4, 3, more=516),
        Tile(512, 75_840, 1, 32, 4, 3, more=644),
        Tile(512, 25_664, 1, 16, 4, 2, more=580),
        Tile(1024, 149_568, 1, 32, 4, 3, more=1156),
        Tile(1024, 84_032, 1, 32, 4, 2, more=1156),
        Tile(1024, 50_240, 1, 16, 4, 2, more=1092),
    ),
    # Over codes, by bits of a value and bytes of a query; each warp has 32 keys of its own. With 16, Triton 3.6 may lay
    # out the weights of a product as bytes, which is wrong in half precision.
    "decode_codes 8": (Tile(256, 66_048, 1, 64, 2, 3, more=728), *_CODES),
    "decode_codes 4": (Tile(256, 49_664, 1, 64, 2, 3, more=874), *_CODES),
}
"""By kernel, best first as measured on an H200; where the first that serves does not fit, a smaller one follows."""


def tile_of(kernel: str, width: int, memory: int, rows: int = 16) -> Tile | None:
    """The tile of a kernel, by its name in `SIZES`, in the shared memory of a device's program; None where none fits.

    `width` is bytes of the largest padded head, `rows` a step's query heads that share keys, up to a power of two.
    """
    fits = (t for t in SIZES[kernel] if width <= t.width and t.memory + t.more * max(0, rows - 16) <= memory)
    return next(fits, None)


def fitting_tile(kernel: str, width: int, memory: int, rows: int = 16) -> Tile:
    """The same for a launch: the backend refuses calls for which none fits."""
    tile = tile_of(kernel, width, memory, rows)
    assert tile is not None, f"no tile of {kernel!r} for heads of {width} bytes"
    return tile


def refusals(kind: CallKind, memory: int) -> list[str]:
    """What a call launches that does not fit a device whose programs may have so much shared memory."""
    kernels: tuple[str, ...] = ("forward", "forward of windows")
    if kind.needs_grad:
        kernels += ("of_keys", "of_keys of runs", "of_queries")
    elif kind.decode:
        kernels = ("decode" if kind.stored is None else f"decode_codes {BITS[kind.stored]}",)
    pad = padded(max(kind.head_dim, kind.head_dim_v))
    return [
        f"no tile of the Triton kernel {kernel!r} for heads of {pad} channels in {kind.dtype}, {kind.groups} of which "
        f"share keys, fits the shared memory of the device's programs, {memory >> 10} KiB"
        for kernel in kernels
        if tile_of(kernel, pad * kind.dtype.itemsize, memory, rows_of(kind.groups)) is None
    ]


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


class Warps(NamedTuple):
    """How the warp-specialised kernel for Hopper shares its work out among warps.

    Attributes:
        groups: Of four warps, with 64 queries each.
        together: Heads of a group of query heads that a program computes: one for each group of warps, or one.
        keys: Of a tile.
        stages: Tiles in a ring.
        alternate: Whether the groups begin their products one after the other.
        ahead: Whether queries come an item ahead.
        dim: Channels of a head.
        sharing: Query heads that share keys.
        window: Whether the call has windows.
    """

    groups: int
    together: int
    keys: int
    stages: int
    alternate: bool
    ahead: bool
    dim: int
    sharing: int
    window: bool

    @property
    def rows(self) -> int:
        """Queries of a work entry."""
        return 64 * self.groups // self.together

    @property
    def pieces(self) -> int:
        """Of a tile: with windows two, which need not lie side by side."""
        return 2 if self.window else 1

    @property
    def part(self) -> int:
        """Keys of a piece."""
        return self.keys // self.pieces


def warps_of(kind: CallKind, window: bool) -> Warps | None:
    """How warps share out calls of a kind, with windows or without, as measured on an H200; None where they lose."""
    dim, sharing = kind.head_dim, kind.groups
    if kind.head_dim_v != dim or kind.dtype.itemsize != 2 or kind.features & SOFTCAP:
        return None
    if dim == 128:
        return Warps(2, 1, 128, 2, window, True, dim, sharing, window)
    if dim == 64:
        # to bring queries ahead is code that has to be fetched again: 1 to 2 % slower here, 2 to 7 % faster above
        return Warps(3, 3 if sharing % 3 == 0 else 1, 128, 2, True, False, dim, sharing, window)
    return None


# Keys that queries of 64 channels see on average, some 100 fewer than blocks of them read, from which on windows gain
# by the kernel for Hopper. With windows of 1,024 everywhere it takes 1.1 times as long as the kernel whose tiles have
# 64 keys where other kernels ran between, as that is far less code to fetch again; of 8 sequences at once 0.9 times as
# long, windows of 512 0.93 times. A quarter is enough from so many items of a program on: how it begins matters little.
_LEAST_OF_WINDOWS = 1950
_MANY_TURNS = 16
# The same without windows where all groups of warps have rows of one head, 192 an item: in documents of 1,000 tokens
# smaller blocks, of the other kernel, take 0.9 times as long.
_LEAST_OF_ROWS = 640


def pays(warps: Warps, pairs: int, queries: int, programs: int) -> bool:
    """Whether queries see enough keys for the kernel for Hopper: with few, too many rows or tiles are at edges.

    `pairs` of queries and keys, and `queries`, are those of all key/value heads.
    """
    if warps.dim == 128 or (warps.together > 1 and not warps.window):
        return True
    many = _MANY_TURNS * programs * 64 * warps.groups <= queries * warps.sharing
    least = _LEAST_OF_WINDOWS // (4 if many else 1) if warps.window else _LEAST_OF_ROWS
    return pairs >= least * queries
