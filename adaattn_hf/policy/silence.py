"""Keeps a library from writing to standard output or standard error past Python.

HiGHS 1.12, scipy's solver, prints lines that no option turns off (github.com/ERGO-Code/HiGHS/issues/2783), and so does
the library behind torch's profiler. A child process with a standard output of its own would be no plainer: each solve
of a search would import scipy again, and a profiler watches its own process alone.
"""

import contextlib
import ctypes
import os
import sys
import weakref
from collections.abc import Iterator

STDOUT = 1
"""The file that C programs print to, whatever Python calls its own."""
LIBC = None if os.name == "posix" else "ucrtbase"
"""Where `fflush` is: in the process itself, or in Windows' C library."""


@contextlib.contextmanager
def silenced(file: int = STDOUT) -> Iterator[None]:
    """Throws away what a library writes to a file of the process, its standard output say, while it lasts.

    What Python prints at that time, as other threads do of progress, still arrives.
    """
    flush = ctypes.CDLL(LIBC).fflush
    if sys.stdout is not None:
        sys.stdout.flush()
    flush(None)  # what Python and C still hold back from before
    try:
        kept = os.dup(file)
    except OSError:  # a process without one
        yield
        return
    nowhere, printed = os.open(os.devnull, os.O_WRONLY), sys.stdout
    letters = {name: getattr(printed, name, None) for name in ("encoding", "errors")}
    passed_on = open(kept, "w", buffering=1, closefd=False, **letters)  # noqa: SIM115
    weakref.finalize(passed_on, os.close, kept)  # a thread may still be printing when the solver is done
    with contextlib.suppress(AttributeError, OSError, ValueError):  # where Python prints to no file of the process
        if printed.fileno() == file:
            sys.stdout = passed_on
    try:
        os.dup2(nowhere, file)
        yield
    finally:
        flush(None)
        os.dup2(kept, file)
        os.close(nowhere)
        sys.stdout = printed
