"""Every command by name: its options and its help; `run` of the module of the same name does what it says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from .on_text import Calibrate, Eval, Profile, Verify
from .options import CACHES, DTYPES, PLAN_DIRECTORY, Json, Options, Source, Threads, argument, option

A_PLAN = "A plan (file, directory or id of the Hub), or the directory of a model that carries one."


@dataclass(frozen=True, kw_only=True)
class Explain(Source, Json):
    """Print which attention backend runs in each layer, and why the others do not.

    Exit codes: 0 done; 2 usage; 4 model unavailable, or the named backend refuses it.
    """

    model: str = argument(..., "Hub id or directory; only its configuration is read.")
    attn_implementation: str = option("adaattn", "Attention implementation.")
    dtype: str | None = option(
        None, "Explain for this dtype; auto takes the config's. Default: the plan's, else auto.", choices=DTYPES
    )
    device: str | None = option(None, "Explain for cpu or cuda, present or not. Default: cuda if there is one.")
    cache: str = option("model", "Explain for a cache of the model's dtype, or of quantised codes.", choices=CACHES)
    streaming: bool = option(False, "Count the bytes of a cache that keeps only the plan's windows.")
    plan: str | None = option(None, "File, directory or hub id of a plan. Default: the one that MODEL carries.")
    verbose: bool = option(False, "Print every reason of every backend, also those for other devices.")


@dataclass(frozen=True, kw_only=True)
class Show(Json):
    """Show a plan as a picture of layers by heads, with its loss and speed.

    Exit codes: 0 done; 2 wrong arguments, or no plan.
    """

    path: Path | None = argument(None, f"{A_PLAN} Default: {PLAN_DIRECTORY}.")
    html: Path | None = option(None, "Also write an HTML page.")
    verbose: bool = option(False, "Also print nats, levels and versions.")


@dataclass(frozen=True, kw_only=True)
class Explore(Json):
    """Write a page with a slider over budgets, from exact to the fastest plan.

    It shows the plan that the solver would choose for each budget. Losses are predicted from the risks that calibration
    measured; what was verified on held-out text is marked. The page works offline.

    Exit codes: 0 done; 2 wrong arguments, no plan, or no report next to it.
    """

    path: Path | None = argument(None, f"{A_PLAN} Default: {PLAN_DIRECTORY}.")
    html: Path = option(..., "HTML page to write.")
    name: str | None = option(None, "Name of the model in the heading. Default: the plan's.")


@dataclass(frozen=True, kw_only=True)
class Bench(Threads, Json):
    """Measure the speed of attention and of whole models against stock attention.

    All implementations take turns at the same work on the same numbers, in one process. Ratios are taken per round.

    Exit codes: 0 done; 1 --gate and a cell below its floor; 2 usage; 3 a file cannot be written; 130 interrupted, with
    finished cells in the file.
    """

    panels: ClassVar = {"Basic": ("only", "attn_implementation", "baseline", "device", "threads", "rounds", "output")}

    only: str = option("", "Regular expression: time only cells with a matching title.")
    rounds: int = option(7, "Samples per implementation and cell; two of what takes over ten times as long.", least=1)
    device: str = option("cpu", "cpu, cuda, cuda:1.")
    baseline: str = option(
        "",
        "Names to compare with, comma-separated: stock ones, or sdpa:KERNEL (flash, efficient, cudnn, math). Default: "
        "all stock ones of the grid.",
    )
    attn_implementation: str = option("adaattn", "The implementation that is timed, such as adaattn or adaattn_sdpa.")
    output: Path | None = option(
        None,
        "JSON file to write, with a `.md` next to it. Cells in it that this machine and these versions measured are "
        "kept. Default: a new one under results/bench.",
    )
    overwrite: bool = option(False, "Start over if another machine or version measured the cells of --output.")
    table: Path | None = option(None, "Write the Markdown to this file instead, e.g. BENCHMARKS.md.")
    gate: bool = option(False, "Exit with 1 if a cell is below its floor, twice.", "--gate/--no-gate")
    memory: bool = option(True, "Measure peak memory, too.")
    profile: Path | None = option(None, "Directory for torch.profiler's traces, and tables of what took longest.")
    grid: Path | None = option(None, "File with another grid of cells. Default: the package's grid for the device.")
    rivals: Path | None = option(
        None,
        "Python of an environment with ONNX Runtime, OpenVINO or llama.cpp, which the grid beside them is timed in.",
    )

    def __post_init__(self) -> None:
        if self.page == self.file:
            better = self.page.with_suffix(".json")
            raise ValueError(f"output: got {self.page}, where the Markdown goes; expected a name such as {better}")
        if self.output is None and self.table is not None:
            raise ValueError(f"table: got {self.table} and no --output, expected the JSON that it is made of beside it")

    @property
    def names(self) -> list[str]:
        """The names in `baseline`."""
        return [name for name in self.baseline.split(",") if name]

    @cached_property
    def file(self) -> Path:
        """The JSON file."""
        return self.output or Path("results", "bench", f"{datetime.now(UTC):%Y%m%d-%H%M%S}.json")

    @property
    def page(self) -> Path:
        """The Markdown page of the JSON file."""
        return self.table or self.file.with_suffix(".md")


@dataclass(frozen=True, kw_only=True)
class Doctor(Json):
    """Show versions, CPU, GPU and backends; what is missing, and how to install it.

    Exit codes: 0 AdaAttn can run here; 1 something that it needs is missing.
    """


@dataclass(frozen=True, kw_only=True)
class Run(Options):
    """Run a Python program in which `adaattn` is a registered attention implementation; nothing else changes.

    Examples: `adaattn run train.py …`, `adaattn run -m trl.scripts.sft --attn_implementation adaattn …`. The program
    runs in this process. Where it starts other processes, let each begin with it, as in
    `accelerate launch --no_python adaattn run train.py …`.

    Exit codes: those of the program; 2 if there is no such program.
    """

    others: ClassVar = {"allow_interspersed_args": False, "ignore_unknown_options": True}

    command: tuple[str, ...] = argument(..., "FILE.py, -m MODULE, or an installed Python program; then its arguments.")
    plan: Path | None = option(None, "Plan (directory or hub id) for models that carry none; other types refuse it.")


COMMANDS: Mapping[str, type[Options]] = {
    "eval": Eval,
    "profile": Profile,
    "explain": Explain,
    "calibrate": Calibrate,
    "verify": Verify,
    "plan show": Show,
    "plan explore": Explore,
    "bench": Bench,
    "doctor": Doctor,
    "run": Run,
}
"""What is typed, to its options. `adaattn_cli.eval.run` does `eval`, `adaattn_cli.plan.show` does `plan show`."""
GROUPS: Mapping[str, str] = {"plan": "Show a plan, or explore other budgets."}
"""First word of several commands, and the help of all of them."""
