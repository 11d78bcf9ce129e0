"""Warps with tasks of their own in the kernel of `eight`: each tile in a process of its own, as one may never end."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial

import torch

from .eight import launch
from .measure import DIM, ON_CUDA, Cell, Section, draw, length, microseconds

TILES = ((64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 4, 2), (128, 64, 4, 3), (128, 128, 8, 2), (128, 64, 8, 3))
SECONDS = 60


def specialised(section: Section) -> None:
    """All tiles."""
    for tile in TILES if ON_CUDA else TILES[:1]:
        section.add(f"1 × 16k, 16/16 × 128, tile {tile}", partial(_apart, tile=tile))


def _apart(row: Cell, tile: tuple[int, int, int, int]) -> None:
    """A tile's figures, from another process; what it fails with is noted."""
    command = [sys.executable, "-m", "studies.cuda.specialised", json.dumps(tile)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        row["failed"] = f"not done after {SECONDS} s"
        return
    if done.returncode:
        row["failed"] = f"exit {done.returncode}: " + " ".join(done.stderr.strip().splitlines()[-3:])[-300:]
        return
    row |= json.loads(done.stdout.splitlines()[-1])


def _tile(tile: tuple[int, int, int, int]) -> Cell:
    """Microseconds with and without tasks of their own; the outputs must be alike."""
    n = length(16384)
    q, k, v = (draw(1, n, 16)[0].contiguous() for _ in range(3))
    row: Cell = {"FLOP": 2.0 * 16 * n * n * DIM}
    row["alike"] = microseconds(lambda: launch(q, k, v, tile, DIM**-0.5))
    before = launch(q, k, v, tile, DIM**-0.5)
    row["specialised"] = microseconds(lambda: launch(q, k, v, tile, DIM**-0.5, True))
    torch.testing.assert_close(launch(q, k, v, tile, DIM**-0.5, True), before, atol=2e-2, rtol=0)
    return row


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_tile(tuple(json.loads(sys.argv[1])))) + "\n")
