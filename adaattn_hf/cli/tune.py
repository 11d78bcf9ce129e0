"""`adaattn tune`: measures the exact backends on this machine, and writes the table that `auto` then goes by."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import EvalError, UsageError, unknown
from .interrupt import interrupted, leave, of_file, terminate_like_interrupt

if TYPE_CHECKING:
    from ..backends.table import Cell

DTYPES = ("float32", "bfloat16", "float16")


def tune(
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: cuda where there is one.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="By commas. Default: bfloat16, on a CPU float32, too.")
    ] = None,
    head_dim: Annotated[str, typer.Option(help="Head sizes by commas.")] = "64,128",
    kinds: Annotated[
        str | None, typer.Option(help="By commas. Default: full,causal,suffix,step, on CUDA all.")
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
        found = _tune(device, dtype, head_dim, kinds, longest, threads, reset, quiet=as_json)
    except EvalError as error:
        leave(error)
    except ValueError as error:
        leave(UsageError(str(error)))
    except OSError as error:
        leave(
            UsageError(f"XDG_CACHE_HOME: {of_file(error, 'the table')}; give a directory that can be written")
        )
    from .classes import lines

    typer.echo(json.dumps(found, indent=1) if as_json else "\n".join(lines(found)))


def _tune(
    device: str | None, dtype: str | None, head_dim: str, kinds: str | None, longest: int | None,
    threads: int | None, reset: bool, quiet: bool,
) -> dict[str, Any]:  # fmt: skip
    import torch

    from adaattn_hf.patches import tuned

    from ..backends.probes import KINDS
    from ..backends.table import LONGEST
    from .classes import grid, report
    from .options import writable

    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if where not in LONGEST or (where == "cuda" and not torch.cuda.is_available()):
        raise UsageError(f"device: got {where!r}, expected cpu, or cuda where torch sees a device")
    path = tuned.path_of(where)
    if reset:
        there = path.exists()
        path.unlink(missing_ok=True)
        return {"file": str(path), "deleted": there}
    writable(path.parent, "XDG_CACHE_HOME")  # else all is measured and nothing kept
    if threads is not None:
        torch.set_num_threads(threads)
    dtypes = _names("dtype", dtype or ("float32,bfloat16" if where == "cpu" else "bfloat16"), DTYPES)
    asked = _names("kinds", kinds or ",".join(KINDS if where == "cuda" else PLAIN), KINDS)
    dims = [int(one) for one in head_dim.split(",") if one.strip().isdigit() and int(one) > 0]
    if not dims or len(dims) != len(head_dim.split(",")):
        raise UsageError(f"head-dim: got {head_dim!r}, expected head sizes by commas, such as 64,128")
    if said := tuned.begin(where):
        typer.echo(f"begun anew: {said}", err=True)
    number = torch.get_num_threads() if where == "cpu" else 0
    cells = [
        cell for cell in dict.fromkeys(grid(where, dtypes, dims, asked, number))
        if longest is None or cell.length <= longest
    ]  # fmt: skip
    _measure(where, cells, quiet)
    return report(where, cells)


PLAIN = ("full", "causal", "suffix", "step")
"""Kinds whose backends lie close together on a CPU."""


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
