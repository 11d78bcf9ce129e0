"""`adaattn run`: runs another program with AdaAttn's names registered, for tools with `--attn_implementation`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Annotated

import typer

from ..errors import UsageError
from .interrupt import leave

CONTEXT_SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": True}
PLAN = "ADAATTN_PLAN"
"""Environment variable by which the startup directory is told of the plan."""
STARTUP = Path(__file__).with_name("startup")
"""Directory that goes in front of the program's path; holds one `sitecustomize`."""


def run(
    command: Annotated[list[str], typer.Argument(help="A program and its arguments, after `--`.")],
    plan: Annotated[
        Path | None,
        typer.Option(help="Plan (directory or hub id) for models that carry none. Models of another type refuse it."),
    ] = None,
) -> None:
    """Run a program in which `adaattn` is a registered attention implementation; nothing else changes.

    Example: `adaattn run -- trl sft --attn_implementation adaattn …`. The names are registered when the program imports
    Transformers, also in Python processes that it starts. This does not reach a Python that ignores its environment
    (`-E`, `-I`).

    Where the system allows it, the program replaces this process, so signals reach it directly.

    Exit codes: those of the program; 2 if there is no such program.
    """
    if plan is not None:
        from adaattn_hf.patches.plans.everywhere import configuration_of

        from ..plans.plan import Plan, PlanError

        try:
            configuration_of(Plan.from_pretrained(plan))
        except (PlanError, OSError) as error:
            leave(UsageError(f"plan: {error}"))
    # the programs of this environment are found where it is not activated, too
    program = shutil.which(command[0]) or shutil.which(command[0], path=sysconfig.get_path("scripts"))
    if program is None:
        leave(
            UsageError(
                f"command: got {command[0]!r}, which is neither on the PATH nor in {sysconfig.get_path('scripts')}; "
                "give a program and its arguments after --"
            )
        )
    # running what the user gave is what the command is for
    if os.name == "posix":  # it takes our place, and our signals
        sys.stdout.flush()
        try:
            os.execve(program, [program, *command[1:]], environment(plan))  # noqa: S606
        except OSError as error:
            leave(
                UsageError(
                    f"command: {program} cannot be started: {error.strerror}; a script names its program in "
                    "its first line, as in #!/bin/sh"
                )
            )
    raise typer.Exit(subprocess.run([program, *command[1:]], env=environment(plan), check=False).returncode)  # noqa: S603


def environment(plan: Path | None = None) -> dict[str, str]:
    """Returns the program's environment: ours, the startup directory first in `PYTHONPATH`, and the plan."""
    kept = os.environ.get("PYTHONPATH", "")
    given = {} if plan is None else {PLAN: str(plan.resolve() if plan.exists() else plan)}
    return {**os.environ, **given, "PYTHONPATH": os.pathsep.join([str(STARTUP), *filter(None, [kept])])}
