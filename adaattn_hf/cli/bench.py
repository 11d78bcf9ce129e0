"""`adaattn bench`: times adaattn against every stock implementation installed here, over a grid of cells in YAML."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

import typer
from rich.console import Console

from ..errors import UsageError
from .fields import with_options
from .interrupt import ending
from .json_output import AsJson, print_json, prints_aside
from .options import Threads, use_threads, writable

PANELS = {
    "Basic": ("only", "attn_implementation", "baseline", "device", "threads", "rounds", "output"),
}


@dataclass(frozen=True)
class Bench:
    """What is timed, and how.

    Attributes:
        only: Regular expression: time only cells with a matching title.
        rounds: Samples per implementation and cell; two of one that takes over ten times as long as ours.
        device: cpu, cuda, cuda:1.
        baseline: Names to compare with, comma-separated: stock ones, or sdpa:KERNEL (flash, efficient, cudnn, math).
            Default: all stock ones of the grid.
        attn_implementation: The implementation that is timed, such as adaattn or adaattn_sdpa.
        output: JSON file to write, with a `.md` next to it. Cells in it that this machine and these versions
            measured are kept. Default: a new one under results/bench.
        overwrite: Start over if another machine or version measured the cells of --output.
        table: Write the Markdown to this file instead, e.g. BENCHMARKS.md.
        gate: Exit with 1 if a cell is below its floor, twice.
        memory: Measure peak memory, too.
        profile: Directory for a torch.profiler trace of each cell and implementation, and a table of what took longest.
        grid: File with another grid of cells. Default: the package's grid for the device.
    """

    only: str = ""
    rounds: int = field(default=7, metadata={"least": 1})
    device: str = "cpu"
    baseline: str = ""
    attn_implementation: str = "adaattn"
    output: Path | None = None
    overwrite: bool = False
    table: Path | None = None
    gate: bool = field(default=False, metadata={"option": "--gate/--no-gate"})
    memory: bool = True
    profile: Path | None = None
    grid: Path | None = None

    @property
    def named(self) -> list[str]:
        """The names in `baseline`."""
        return [name for name in self.baseline.split(",") if name]

    @cached_property
    def file(self) -> Path:
        """The JSON file."""
        return self.output or Path("results", "bench", f"{datetime.now(UTC):%Y%m%d-%H%M%S}.json")

    @property
    def page(self) -> Path:
        """The Markdown page of the JSON file; UsageError if it is that file itself."""
        page = self.table or self.file.with_suffix(".md")
        if page == self.file:
            better = page.with_suffix(".json")
            raise UsageError(f"output: got {page}, where the Markdown goes; expected a name such as {better}")
        return page


@with_options(asked=Bench)
def bench(*, asked: Bench, threads: Threads = None, as_json: AsJson = False) -> None:
    """Measure the speed of attention and of whole models against stock attention.

    All implementations take turns at the same work on the same numbers, in one process. Ratios are taken per round.
    Exit codes: 0 done; 1 --gate and a cell below its floor; 2 usage; 3 a file cannot be written; 130 interrupted, with
    finished cells in the file.
    """
    # what loads torch is imported when the command runs, not when its help is asked for
    from adaattn_hf.eval.bench.grid import read_grid
    from adaattn_hf.patches.checkpoint import resolve_device

    from .bench_job import check_names, choose_cells, run

    def kept() -> str:
        if asked.file.is_file():
            return f"finished cells are kept in {asked.file}; --output {asked.file} --only REGEX adds others"
        return "no cell was finished"

    with (
        ending(
            argument="output",
            default=asked.file,
            stays="cells that were finished before are kept, where --only REGEX adds the others",
            kept=kept,
        ),
        prints_aside(as_json),
    ):
        use_threads(threads)
        where = resolve_device(asked.device)
        data = read_grid(asked.grid, where.type)
        cells = choose_cells(data, asked.only)
        check_names([asked.attn_implementation, *asked.named])
        if asked.output is None and asked.table is not None:
            raise UsageError(
                f"table: got {asked.table} and no --output, expected the JSON that it is made of beside it"
            )
        writable(asked.file.parent, "output")
        writable(asked.page.parent, "table")
        if asked.profile is not None:
            writable(asked.profile, "profile")
        report, failed = run(cells, data, where, asked, Console(stderr=as_json))
    if as_json:
        print_json(report)
    if asked.gate and failed:
        raise typer.Exit(1)
