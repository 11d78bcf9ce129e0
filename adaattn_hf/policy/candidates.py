"""The choices a unit may take: kinds of sparsity and rank crossed with precisions.

A combined choice is the sum of its parts to first order, so risks are measured for the parts and prices for
the whole.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from adaattn_hf.plan import EXACT, Choice

FAMILIES = ("window", "blocks", "rank", "bf16", "int8")
WINDOWS = (256, 512, 1024, 2048, 4096)
WINDOWS_BOTH_WAYS = (32, 64, 128, 256, 512, 1024, 2048)
"""Of bidirectional attention: a window of W sees 2 W - 1 keys."""
MASSES = (0.95, 0.98, 0.99, 0.995)
SINKS = 16


@dataclass(frozen=True)
class Candidates:
    """The choices, and the parts whose products with the gradient they add up from.

    Attributes:
        choices: All choices; the first is exact.
        parts: The choices whose effect is measured.
        combine: `[len(choices), len(parts)]` of zeros and ones.
    """

    choices: tuple[Choice, ...]
    parts: tuple[Choice, ...]
    combine: NDArray[np.float64]


def refuse_unknown(families: Sequence[str]) -> None:
    """Refuses names of families that there are none of.

    Raises:
        ValueError: If a family is unknown.
    """
    for family in families:
        if family not in FAMILIES:
            near = difflib.get_close_matches(family, FAMILIES, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"family {family!r} is unknown, expected some of {list(FAMILIES)}{hint}")


def candidates(
    length: int,
    head_dim: int,
    dtype: str,
    families: Sequence[str] = FAMILIES,
    windows: Sequence[int] = WINDOWS,
    masses: Sequence[float] = MASSES,
    causal: bool = True,
) -> Candidates:
    """Returns the choices that make sense for sequences up to `length` and heads of `head_dim` in `dtype`.

    Windows that leave out less than a quarter of the scores are left out (they save nothing worth a launch: a
    causal window of half the sequence, one that looks both ways of three eighths), ranks are multiples of 16,
    bfloat16 is a choice for float32 models alone.

    Raises:
        ValueError: If a family is unknown.
    """
    refuse_unknown(families)
    kinds = [EXACT]
    if "window" in families:
        widest = length // 2 - SINKS if causal else (3 * length // 4 - SINKS) // 2
        kinds += [Choice("window", window, SINKS) for window in windows if window <= widest]
    if "blocks" in families and length >= 512:
        kinds += [Choice("blocks", sinks=SINKS, mass=mass) for mass in masses]
    ranks: list[Choice] = []
    if "rank" in families:
        ranks = [
            Choice(rank=rank)
            for rank in sorted({head_dim // 2, head_dim * 3 // 4})
            if rank >= 16 and rank % 16 == 0
        ]
    precisions = [EXACT]
    if "bf16" in families and dtype == "float32":
        precisions.append(Choice(precision="bf16"))
    if "int8" in families:
        precisions.append(Choice(precision="int8"))
    parts = (*kinds[1:], *ranks, *precisions[1:])
    choices: list[Choice] = []
    rows: list[NDArray[np.float64]] = []
    for kind in (*kinds, *ranks):
        for precision in precisions if kind not in ranks else [EXACT]:
            choices.append(replace(kind, precision=precision.precision))
            rows.append(np.array([float(part in (kind, precision) and part != EXACT) for part in parts]))
    return Candidates(tuple(choices), parts, np.array(rows).reshape(len(choices), len(parts)))
