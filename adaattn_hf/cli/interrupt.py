"""Ends a command early: after Ctrl-C or a kill, or because of an error."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from ..errors import EvalError


@contextmanager
def terminate_like_interrupt() -> Iterator[None]:
    """Let SIGTERM end a run as Ctrl-C does: finished work is kept, and the command that goes on is printed."""
    try:
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    except ValueError:  # not the main thread: whoever started it keeps its signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def interrupted(kept: str) -> NoReturn:
    """Says on stderr what an interrupted command keeps, and ends it with exit code 130."""
    import typer
    from rich.console import Console

    Console(stderr=True).print(f"interrupted: {kept}", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(130) from None


def of_file(error: OSError, default: object) -> str:
    """The file that could not be read or written, `default` where the error names none, and why."""
    return f"{error.filename or default}: {error.strerror or error}"


def leave(error: EvalError) -> NoReturn:
    """Says what is wrong on stderr and ends a command with the error's exit code."""
    import typer
    from rich.console import Console

    from ..plans.wording import printable

    said = "\n".join(map(printable, str(error).splitlines()))
    Console(stderr=True).print(f"error: {said}", style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(error.exit_code) from error
