"""`adaattn bench`: times adaattn against every stock implementation installed here, over a grid of cells in YAML."""

from __future__ import annotations

import tempfile
from pathlib import Path

import typer

from ..errors import UsageError
from .asked import Bench
from .fields import with_options
from .interrupt import ending
from .json_output import AsJson, print_reports, tables_aside
from .options import writable


@with_options(asked=Bench)
def bench(*, asked: Bench, as_json: AsJson = False) -> None:
    """Measure the speed of attention and of whole models against stock attention.

    Every implementation does the same work on the same numbers in one process, in turn. Ratios are taken per round.
    Exit codes: 0 done; 1 --gate and a cell below its floor; 2 usage; 3 a file cannot be written; 130 interrupted, with
    finished cells in --output.
    """
    # what loads torch is imported when the command runs, not when its help is asked for
    from adaattn_hf.eval.bench.grid import read_grid
    from adaattn_hf.patches.checkpoint import resolve_device

    from .bench_job import check_names, choose_cells, run

    output = asked.output

    def kept() -> str:
        if output is None:
            return "nothing was kept; --output FILE keeps every cell as it is finished"
        if output.is_file():
            return f"finished cells are kept in {output}, where --only REGEX adds the others"
        return "no cell was finished"

    with ending(
        argument="output",
        default=output or asked.table,
        stays="cells that were finished before are kept, where --only REGEX adds the others",
        kept=kept,
    ):
        where = resolve_device(asked.device)
        data = read_grid(asked.grid, where.type)
        cells = choose_cells(data, asked.only)
        check_names([asked.ours, *asked.named])
        if output is not None:
            writable(output.parent, "output")
            writable(asked.page(output).parent, "table")
        elif asked.table is not None and not as_json:
            raise UsageError(
                f"table: got {asked.table} and no --output, expected the JSON that it is made of beside it"
            )
        if asked.profile is not None:
            writable(asked.profile, "profile")
        with tempfile.TemporaryDirectory() as scratch:
            report = output or (Path(scratch) / "bench.json" if as_json else None)
            with tables_aside(as_json):
                failed = run(cells, data, where, asked, report)
            if as_json and report is not None:
                print_reports([report])
    if asked.gate and failed:
        raise typer.Exit(1)
