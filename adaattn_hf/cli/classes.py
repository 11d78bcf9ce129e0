"""Lists the classes of calls that `adaattn tune` measures, and words its results."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from adaattn_hf.patches import tuned

from ..backends.base import spec_of
from ..backends.probes import HEADS, SHORTEST, probes
from ..backends.select import order
from ..backends.table import Cell, clearly_faster, longest_of


def grid(
    device: str, dtypes: Iterable[str], head_dims: Iterable[int], kinds: Iterable[str], threads: int
) -> Iterator[Cell]:
    """Yields the classes of calls to measure: every length, with and without grouped heads, one example and eight."""
    classes = [
        (kind, 1 << n)
        for kind in kinds
        for n in range(longest_of(device, kind).bit_length())
        if 1 << n >= SHORTEST.get(kind, 1)
    ]
    for dtype, dim, (kind, length) in itertools.product(dtypes, head_dims, classes):
        rows = 1 if "step" in kind else max(2, min(512, length // 4)) if kind == "suffix" else length
        for grouped, examples in itertools.product((False, True), (1, 8)):
            cell = Cell(kind, dtype, dim, grouped, False, length, 0, threads)
            if device == "cuda":
                work = (HEADS * examples * rows * length).bit_length() // 3
            else:
                work = (
                    (2 * 8 * examples * length * dim * getattr(torch, dtype).itemsize).bit_length() // 3
                    if rows == 1
                    else 0
                )
            yield cell._replace(work=work)


def report(device: str, cells: Sequence[Cell]) -> dict[str, Any]:
    """Returns, for each class: the first backend of the built-in order, the one that is taken, and all times."""
    table = tuned.current(device)
    rows = []
    for cell in cells:
        times = {} if table is None else table.cells.get(cell, {})
        for request in itertools.islice(probes(device, cell, blank=True), 1):
            first = next((name for name in order(spec_of(request)) if name in times), None)
            taken = None if first is None else next(iter(clearly_faster(times, first)), first)
            rows.append({**cell._asdict(), "default": first, "taken": taken, "times": times})
    return {"file": str(tuned.path_of(device)), "key": tuned.key_of(device), "cells": rows}


def lines(report: dict[str, Any]) -> Iterator[str]:
    """Returns lines that name the file and every class in which a measured backend replaces the built-in order."""
    if "deleted" in report:
        yield f"{report['file']}: {'deleted' if report['deleted'] else 'there was none'}"
        return
    rows = [row for row in report["cells"] if row["taken"] != row["default"]]
    yield f"{report['file']}: {len(report['cells'])} classes of calls, {len(rows)} leave the built-in order"
    for row in rows:
        heads = "grouped heads" if row["grouped"] else "heads"
        times = ", ".join(
            f"{name} {' and '.join(f'{middle:.3g}' for _, middle, _ in probes)} µs"
            for name, probes in row["times"].items()
            if name in (row["taken"], row["default"])
        )
        yield (
            f"  {row['kind']}, {row['dtype']}, {heads} of {row['head_dim']}, {row['length'] // 2 + 1} to "
            f"{row['length']} keys, work class {row['work']}: {row['taken']} for {row['default']} ({times})"
        )
