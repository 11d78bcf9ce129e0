"""What may end a command early, each in one sentence: options, files, memory that is full, Ctrl-C or a kill."""

import contextlib
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import torch
import typer
from rich.console import Console

from adaattn_hf.errors import CPU_ALLOCATOR, DataUnavailable, EvalError, OutOfMemory, UsageError, memory_is_full
from adaattn_hf.eval.progress import tell

from . import interrupt

MOST_THREADS = 1024
"""A machine without so many CPUs makes this many threads, too; of far more OpenMP makes none, and ends the process."""


@contextmanager
def ending(
    *,
    argument: str = "file",
    default: object = None,
    kept: Callable[[], str] | None = None,
    wrong: tuple[type[Exception], ...] = (),
) -> Iterator[None]:
    """Context manager: errors end the command with one sentence and their exit code.

    Args:
        argument: Name printed before a file that cannot be read or written.
        default: The file to name if the error names none.
        kept: What an interrupted command keeps, or one whose disk is full; None for a command without --resume.
        wrong: Errors that mean a mistake in the arguments.
    """
    before = None
    if kept is not None:
        with contextlib.suppress(ValueError):  # not the main thread: whoever started it keeps its signals
            # a polite kill ends a run as Ctrl-C does: finished work is kept, and the command to continue is printed
            before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except wrong as error:
        if isinstance(error, OSError) and error.errno is not None:
            leave(UsageError(of_file(error, default)))
        leave(UsageError(str(error)))
    except EvalError as error:
        leave(error)
    except OSError as error:
        stays = "" if kept is None else f"; {kept()}"
        leave(DataUnavailable(f"{argument}: {of_file(error, default)}{stays}"))
    except KeyboardInterrupt as error:
        if kept is None:
            raise
        tell(Console(stderr=True), f"interrupted: {kept()}")
        raise typer.Exit(143 if signal.SIGTERM in error.args else 130) from None
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def of_file(error: OSError, default: object) -> str:
    """Returns the file that could not be read or written (`default` if the error names none), and why."""
    return f"{error.filename or default}: {error.strerror or error}"


def leave(error: EvalError) -> NoReturn:
    """Prints an error on stderr and exits with its code."""
    tell(Console(stderr=True, style="red"), *f"error: {error}".splitlines())
    raise typer.Exit(error.exit_code) from error


@contextmanager
def room_or_sentence(sentence: Callable[[str], str]) -> Iterator[None]:
    """Context manager: replaces an out-of-memory error of the allocator by OutOfMemory with the given sentence."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not memory_is_full(error):
            raise
        text = " ".join(str(error).split()) or type(error).__name__
        text = text[text.find(CPU_ALLOCATOR) :] if CPU_ALLOCATOR in text else text
        for advice in (" Including non-PyTorch", " Of the allocated memory", " If reserved", " Error code"):
            text = text.partition(advice)[0]
        raise OutOfMemory(sentence(text.rstrip(". "))) from error


def writable(directory: Path, argument: str) -> None:
    """Refuses a directory that cannot be made or written to (UsageError); makes none, which a failure would leave."""
    existing = next(place for place in (directory, *directory.absolute().parents) if os.path.lexists(place))
    try:
        # permissions do not say it all: nobody can make a file in /proc, on a full disk or on one mounted for reading
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        what = "written to" if directory.is_dir() else "made"
        raise UsageError(
            f"{argument}: {directory} cannot be {what} ({error.strerror}); give a directory that can be written"
        ) from error


def use_threads(threads: int | None) -> None:
    """Sets the number of torch's threads; `None` leaves it unchanged. UsageError for none, or more than can be made."""
    if threads is None:
        return
    most = max(os.cpu_count() or 1, MOST_THREADS)
    if not 1 <= threads <= most:
        raise UsageError(f"threads is {threads}, expected from 1 to {most}")
    torch.set_num_threads(threads)
