"""Ends a command early: after Ctrl-C or a kill, or because of an error."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer
from rich.console import Console

from adaattn_hf.eval.progress import tell

from ..errors import DataUnavailable, EvalError, UsageError


@contextmanager
def ending(
    *,
    argument: str = "file",
    default: object = None,
    stays: str = "",
    kept: Callable[[], str] | None = None,
    wrong: tuple[type[Exception], ...] = (),
) -> Iterator[None]:
    """While it lasts, errors end the command with a sentence and their exit code.

    Args:
        argument: What is named before a file that cannot be read or written.
        default: The file that is meant where an error names none.
        stays: What is said behind it: what is kept.
        kept: What an interrupted command keeps; None for one that is not told to go on.
        wrong: Errors that mean a mistake in the arguments.
    """
    try:
        with contextlib.nullcontext() if kept is None else terminate_like_interrupt():
            yield
    except wrong as error:
        if isinstance(error, OSError) and error.errno is not None:
            leave(UsageError(of_file(error, default)))
        leave(UsageError(str(error)))
    except EvalError as error:
        leave(error)
    except OSError as error:
        leave(DataUnavailable(f"{argument}: {of_file(error, default)}{stays and f'; {stays}'}"))
    except KeyboardInterrupt:
        if kept is None:
            raise
        interrupted(kept())


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
    tell(Console(stderr=True), f"interrupted: {kept}")
    raise typer.Exit(130) from None


def of_file(error: OSError, default: object) -> str:
    """The file that could not be read or written, `default` where the error names none, and why."""
    return f"{error.filename or default}: {error.strerror or error}"


def leave(error: EvalError) -> NoReturn:
    """Says what is wrong on stderr and ends a command with the error's exit code."""
    for line in f"error: {error}".splitlines():
        tell(Console(stderr=True, style="red"), line)
    raise typer.Exit(error.exit_code) from error
