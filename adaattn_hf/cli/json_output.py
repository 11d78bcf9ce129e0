"""`--json`: prints JSON alone on standard output; everything else goes to standard error."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Annotated, Any

import typer

from .._files import json_text

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON; everything else goes to stderr.")]


def libraries_aside() -> None:
    """Redirect what libraries write to stdout outside Python to stderr, for the rest of the process."""
    try:
        if sys.stdout.fileno() != 1:
            return
    except io.UnsupportedOperation:  # a caller's buffer, which no library writes to
        return
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(own, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)


def prints_aside(asked: bool) -> contextlib.AbstractContextManager[Any]:
    """What Python prints goes to stderr meanwhile, if `--json` was given: models and data sets may print."""
    return contextlib.redirect_stdout(sys.stderr) if asked else contextlib.nullcontext()


def print_json(value: Any) -> None:
    """Prints a value as JSON, with null for numbers that are not finite."""
    typer.echo(json_text(value, indent=1))
