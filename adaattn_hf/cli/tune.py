"""`adaattn tune`: measures the exact backends on this machine, and writes the table that `auto` then goes by."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import EvalError, UsageError, unknown
from .interrupt import interrupted, leave, terminate_like_interrupt

if TYPE_CHECKING:
    from ..backends.table import Cell

DTYPES = ("float32", "bfloat16", "float16")


def tune(
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: cuda where there is one.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Dtypes by commas. Default: bfloat16, on a CPU float32, too.")
    ] = None,
    head_dim: Annotated[str, typer.Option(help="Head sizes by commas.")] = "64,128",
    kinds: Annotated[
        str | None,
        typer.Option(
            help="Kinds of calls by commas. Default: full,causal,suffix,step, on CUDA window,ragged,'padded step', too."
        ),
    ] = None,
    longest: Annotated[
        int | None, typer.Option(min=1, help="Greatest length. Default: that of the table.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads on a CPU; the table speaks for this number alone.")
    ] = None,
    reset: Annotated[
        bool, typer.Option("--reset", help="Delete the device's table and measure nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Measure which exact backend is the fastest here, per class of calls; `auto` takes what wins clearly.

    What the table holds already is kept, so that an interrupted run goes on.

    Exit codes: 0 done; 2 usage; 130 interrupted.
    """
    try:
        report = _tune(device, dtype, head_dim, kinds, longest, threads, reset, quiet=as_json)
    except EvalError as error:
        leave(error)
    typer.echo(json.dumps(report, indent=1) if as_json else "\n".join(_lines(report)))


def _tune(
    device: str | None, dtype: str | None, head_dim: str, kinds: str | None, longest: int | None,
    threads: int | None, reset: bool, quiet: bool,
) -> dict[str, Any]:  # fmt: skip
    import torch

    from adaattn_hf.patches import tuned

    from ..backends.probes import KINDS
    from ..backends.table import LONGEST, Table, TableError

    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if where not in LONGEST or (where == "cuda" and not torch.cuda.is_available()):
        raise UsageError(f"device: got {where!r}, expected cpu, or cuda where torch sees a device")
    path = tuned.path_of(where)
    if reset:
        there = path.exists()
        path.unlink(missing_ok=True)
        return {"file": str(path), "deleted": there}
    if threads is not None:
        torch.set_num_threads(threads)
    dtypes = _names("dtype", dtype or ("float32,bfloat16" if where == "cpu" else "bfloat16"), DTYPES)
    asked = _names("kinds", kinds or ",".join(KINDS if where == "cuda" else PLAIN), KINDS)
    dims = [int(one) for one in head_dim.split(",") if one.strip().isdigit() and int(one) > 0]
    if not dims or len(dims) != len(head_dim.split(",")):
        raise UsageError(f"head-dim: got {head_dim!r}, expected head sizes by commas, such as 64,128")
    try:
        if path.exists():
            Table.read(path, tuned.key_of(where))
    except TableError as error:
        typer.echo(f"begun anew: {error}", err=True)
        path.unlink()
    tuned.forget()
    number = torch.get_num_threads() if where == "cpu" else 0
    cells = [
        cell for cell in dict.fromkeys(grid(where, dtypes, dims, asked, number))
        if cell.length <= (longest or LONGEST[where])
    ]  # fmt: skip
    _measure(where, cells, quiet)
    return _report(where, cells)


PLAIN = ("full", "causal", "suffix", "step")
"""Kinds whose backends lie close together on a CPU."""


def grid(
    device: str, dtypes: Iterable[str], head_dims: Iterable[int], kinds: Iterable[str], threads: int
) -> Iterator[Cell]:
    """Classes of calls without gradients, of all lengths: heads alike and grouped, one example and eight of them."""
    import torch

    from ..backends.probes import HEADS, SHORTEST
    from ..backends.table import LONGEST, Cell

    lengths = [1 << n for n in range(LONGEST[device].bit_length())]
    for dtype, dim, kind, length in itertools.product(dtypes, head_dims, kinds, lengths):
        if length < SHORTEST.get(kind, 1):
            continue
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


def _names(argument: str, text: str, known: Sequence[str]) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise UsageError(unknown(argument, name, known))
    return names


def _measure(device: str, cells: Sequence[Cell], quiet: bool) -> None:
    """Measure what the table lacks; each class is kept at once."""
    from adaattn_hf.patches import tuned

    table = tuned.current(device)
    lacking = [cell for cell in cells if table is None or cell not in table.cells]
    with terminate_like_interrupt():
        try:
            for number, cell in enumerate(lacking, 1):
                tuned.keep(device, cell)
                if not quiet and number % 20 == 0:
                    typer.echo(f"{number} of {len(lacking)} classes of calls", err=True)
        except KeyboardInterrupt:
            interrupted("what was measured lies in the table; the same command goes on")


def _report(device: str, cells: Sequence[Cell]) -> dict[str, Any]:
    """The classes that were asked for: which backend is first in the built-in order, which is taken, all times."""
    from adaattn_hf.patches import tuned

    from ..backends.base import spec_of
    from ..backends.probes import probes
    from ..backends.select import order
    from ..backends.table import clearly_faster

    table = tuned.current(device)
    rows = []
    for cell in cells:
        times = {} if table is None else table.cells.get(cell, {})
        for request in itertools.islice(probes(device, cell, blank=True), 1):
            first = next((name for name in order(spec_of(request)) if name in times), None)
            taken = None if first is None else next(iter(clearly_faster(times, first)), first)
            rows.append({**cell._asdict(), "default": first, "taken": taken, "times": times})
    return {"file": str(tuned.path_of(device)), "key": tuned.key_of(device), "cells": rows}


def _lines(report: dict[str, Any]) -> Iterator[str]:
    """The file, and the classes that leave the built-in order."""
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
