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
    stays: str | Callable[[], str] = "",
    kept: Callable[[], str] | None = None,
    wrong: tuple[type[Exception], ...] = (),
) -> Iterator[None]:
    """Context manager: errors end the command with one sentence and their exit code.

    Args:
        argument: Name printed before a file that cannot be read or written.
        default: The file to name if the error names none.
        stays: Sentence on what is kept, added to such an error; where that shows only then, a function.
        kept: What an interrupted command keeps; None for a command without --resume.
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
        words = stays() if callable(stays) else stays
        leave(DataUnavailable(f"{argument}: {of_file(error, default)}{words and f'; {words}'}"))
    except KeyboardInterrupt:
        if kept is None:
            raise
        tell(Console(stderr=True), f"interrupted: {kept()}")
        raise typer.Exit(130) from None


@contextmanager
def terminate_like_interrupt() -> Iterator[None]:
    """Let SIGTERM end a run as Ctrl-C does: finished work is kept, and the command to continue is printed."""
    try:
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    except ValueError:  # not the main thread: whoever started it keeps its signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def of_file(error: OSError, default: object) -> str:
    """Returns the file that could not be read or written (`default` if the error names none), and why."""
    return f"{error.filename or default}: {error.strerror or error}"


def leave(error: EvalError) -> NoReturn:
    """Prints an error on stderr and exits with its code."""
    for line in f"error: {error}".splitlines():
        tell(Console(stderr=True, style="red"), line)
    raise typer.Exit(error.exit_code) from error
