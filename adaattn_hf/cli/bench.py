"""`adaattn bench`: times adaattn against every stock implementation installed here, over a grid of cells in YAML."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from ..errors import DataUnavailable, EvalError, UsageError
from .interrupt import interrupted, leave, of_file, terminate_like_interrupt
from .json_output import AsJson, print_reports, tables_aside


def bench(
    only: Annotated[str, typer.Option(help="Regular expression; cells whose title it matches.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Samples per implementation and cell.")] = 7,
    threads: Annotated[int, typer.Option(min=0, help="Threads of torch; 0 leaves them as they are.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    implementations: Annotated[
        str,
        typer.Option(
            help="Names, comma-separated: stock ones, sdpa:KERNEL (flash, efficient, cudnn, math), "
            "installed peers (xformers, say). "
            "By default all stock ones of the grid and all peers that are here."
        ),
    ] = "",
    ours: Annotated[str, typer.Option(help="Our name: adaattn, adaattn_sdpa, say.")] = "adaattn",
    output: Annotated[
        Path | None,
        typer.Option(
            help="JSON to write, a `.md` beside it; cells that it holds stay where this machine and these versions "
            "measured them."
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Begin again where others measured the cells of --output.")
    ] = False,
    table: Annotated[
        Path | None, typer.Option(help="Where the Markdown goes instead, e.g. BENCHMARKS.md.")
    ] = None,
    gate: Annotated[bool, typer.Option(help="Exit with 1 if a cell is below its floor, twice.")] = False,
    memory: Annotated[bool, typer.Option(help="Measure peak memory, too.")] = True,
    profile: Annotated[
        Path | None,
        typer.Option(help="Directory for a torch.profiler trace of each cell and implementation."),
    ] = None,
    grid: Annotated[Path | None, typer.Option(help="Another grid than the one of the package.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the speed of attention and of whole models against stock attention.

    Every implementation does the same work on the same numbers in one process, in turn. Ratios are taken per round.
    Exit codes: 0 done; 1 --gate and a cell below its floor; 2 usage; 3 a file cannot be written; 130 interrupted, with
    finished cells in --output.
    """
    # what loads torch is imported when the command runs, not when its help is asked for
    from adaattn_hf.eval.bench.grid import read_grid
    from adaattn_hf.patches.checkpoint import resolve_device

    from .bench_job import check_names, choose_cells, page_of, run
    from .options import writable

    try:
        where = resolve_device(device)
        data = read_grid(grid, where.type)
        cells = choose_cells(data, only)
        check_names([ours, *(name for name in implementations.split(",") if name)])
        if output is not None:
            writable(output.parent, "output")
            writable(page_of(output, table).parent, "table")
        elif table is not None and not as_json:
            raise UsageError(
                f"table: got {table} and no --output, expected the JSON that it is made of beside it"
            )
        if profile is not None:
            writable(profile, "profile")
    except ValueError as error:
        leave(UsageError(str(error)))
    try:
        with tempfile.TemporaryDirectory() as scratch:
            kept = output or (Path(scratch) / "bench.json" if as_json else None)
            with terminate_like_interrupt(), tables_aside(as_json):
                failed = run(
                    cells,
                    data,
                    rounds,
                    threads,
                    where,
                    implementations,
                    ours,
                    kept,
                    overwrite,
                    table,
                    gate,
                    memory,
                    profile,
                )
            if as_json and kept is not None:
                print_reports([kept])
    except KeyboardInterrupt:
        interrupted(
            "nothing was kept; --output FILE keeps every cell as it is finished"
            if output is None
            else f"finished cells are kept in {output}, where --only REGEX adds the others"
            if output.is_file()
            else "no cell was finished"
        )
    except EvalError as error:
        leave(error)
    except OSError as error:
        why = of_file(error, output or table)
        stays = "cells that were finished before are kept, where --only REGEX adds the others"
        leave(DataUnavailable(f"output: {why}; {stays}"))
    if gate and failed:
        raise typer.Exit(1)
