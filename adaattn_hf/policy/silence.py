"""Keeps a library from writing to standard output or standard error past Python.

HiGHS 1.12, scipy's solver, prints lines that no option turns off (github.com/ERGO-Code/HiGHS/issues/2783).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator

STDOUT = 1
"""The file that C programs print to, whatever Python calls its own."""
LIBC = None if os.name == "posix" else "ucrtbase"
"""Where `fflush` is: in the process itself, or in Windows' C library."""


@contextlib.contextmanager
def silenced(file: int = STDOUT) -> Iterator[None]:
    """Throws away what is written to a file of the process, its standard output say, while it lasts."""
    _flush()
    try:
        kept = os.dup(file)
    except OSError:  # a process without one
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, file)
        yield
    finally:
        ctypes.CDLL(LIBC).fflush(None)
        os.dup2(kept, file)
        os.close(kept)
        os.close(nowhere)


def _flush() -> None:
    """Writes out what Python and C still hold back from before."""
    if sys.stdout is not None:
        sys.stdout.flush()
    ctypes.CDLL(LIBC).fflush(None)
