"""Tile sizes and the score factor that the launches share."""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """How a kernel cuts its work: query rows, key columns, warps, stages of its pipeline, most registers a thread."""

    rows: int
    columns: int
    warps: int
    stages: int
    registers: int | None = None

    def constants(self) -> dict[str, int]:
        """As the kernels and Triton's compiler name them, but the registers."""
        return {
            "BLOCK_M": self.rows, "BLOCK_N": self.columns, "num_warps": self.warps, "num_stages": self.stages
        }  # fmt: skip


def padded(dim: int) -> int:
    """Tile width for a head size: a power of two, at least 16."""
    return max(16, 1 << (dim - 1).bit_length())


def scale_of(scaling: float, softcap: float | None) -> float:
    """The factor on products of queries and keys; it includes log2(e) unless a softcap follows.

    Never 0, because -inf * 0 (a hidden key) is NaN; 1e-30 weighs all keys alike as well.
    """
    return float(scaling) if softcap is not None else (scaling or 1e-30) * 1.4426950408889634
