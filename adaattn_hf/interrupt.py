"""How a command is asked to stop."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def terminate_like_interrupt() -> Iterator[None]:
    """Let a polite kill end a run as Ctrl-C does: with what is finished kept and the way on printed."""
    try:
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    except ValueError:  # not the main thread: whoever started it keeps its signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
