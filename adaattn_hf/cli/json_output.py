"""`--json`: standard output holds JSON alone, and everything that is said meanwhile goes to standard error."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON; tables go to stderr.")]


@contextlib.contextmanager
def tables_aside(asked: bool) -> Iterator[None]:
    """Send what is printed to stderr while it lasts, where `--json` was given."""
    if not asked:
        yield
        return
    with contextlib.redirect_stdout(sys.stderr):
        yield


def print_reports(paths: list[Path]) -> None:
    """Print the reports of files: one as it is, several as a list."""
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    typer.echo(json.dumps(reports[0] if len(reports) == 1 else reports, indent=1))
