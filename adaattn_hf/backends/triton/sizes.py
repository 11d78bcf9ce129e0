"""Sizes and factors that the launches share."""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """How a kernel cuts its work: query rows, key columns, warps, stages of its pipeline, most registers a thread."""

    rows: int
    columns: int
    warps: int
    stages: int
    registers: int | None = None


def padded(dim: int) -> int:
    """Tile width for a head size: a power of two, at least 16."""
    return max(16, 1 << (dim - 1).bit_length())


def scale_of(scaling: float, softcap: float | None) -> float:
    """The factor on products of queries and keys, which takes scores to base 2 where no softcap comes between.

    Never zero, by which what is hidden (-inf) could not be multiplied: scores of 1e-30 weigh as much.
    """
    return float(scaling) if softcap is not None else (scaling or 1e-30) * 1.4426950408889634
