"""`adaattn run`: runs a Python program with AdaAttn's names registered, for tools with `--attn_implementation`."""

from __future__ import annotations

import importlib.metadata
import runpy
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import UsageError
from .interrupt import leave

CONTEXT_SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": True}


def run(
    command: Annotated[
        list[str], typer.Argument(help="FILE.py, -m MODULE, or an installed Python program; then its arguments.")
    ],
    plan: Annotated[
        Path | None,
        typer.Option(help="Plan (directory or hub id) for models that carry none. Models of another type refuse it."),
    ] = None,
) -> None:
    """Run a Python program in which `adaattn` is a registered attention implementation; nothing else changes.

    Examples: `adaattn run train.py …`, `adaattn run -m trl.scripts.sft --attn_implementation adaattn …`. The program
    runs in this process. Where it starts other processes, let each begin with it, as in
    `accelerate launch --no_python adaattn run train.py …`.

    Exit codes: those of the program; 2 if there is no such program.
    """
    import adaattn_hf  # noqa: F401 - registers the names

    _bind(plan)
    if command[0] == "-m" and len(command) > 1:
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    elif Path(command[0]).is_file():
        sys.argv = command
        sys.path.insert(0, str(Path(command[0]).resolve().parent))  # as `python FILE.py` does
        runpy.run_path(command[0], run_name="__main__")
    else:
        sys.argv = command
        raise SystemExit(_console_script(command[0])())


def _console_script(name: str) -> Any:
    scripts = importlib.metadata.entry_points(group="console_scripts", name=name)
    if not scripts:
        leave(
            UsageError(
                f"command: got {name!r}, expected a file, -m MODULE or a Python program installed in {sys.prefix}; "
                "Python itself is not named: adaattn run train.py"
            )
        )
    return next(iter(scripts)).load()


def _bind(directory: Path | None) -> None:
    from adaattn_hf.patches.plans.everywhere import bind_when_loaded

    from ..plans.plan import Plan, PlanError

    try:
        bind_when_loaded(None if directory is None else Plan.from_pretrained(directory))
    except (PlanError, OSError) as error:
        leave(UsageError(f"plan: {error}"))
