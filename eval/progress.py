"""What a user sees while a command runs: lines, bars, and how far the work is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from adaattn_hf._files import printable

if TYPE_CHECKING:
    from .runner import Progress as Told

EVERY = 10.0
"""Seconds between two lines where there is no terminal."""


def tell(console: Console, line: str) -> None:
    """Prints a line as it is: names in it bring no markup, no colour and no control sequence."""
    console.print(printable(line), markup=False, highlight=False, soft_wrap=True)


@contextmanager
def beating(sentence: Callable[[float], str], console: Console, *, quiet: bool = False) -> Iterator[None]:
    """Says how far the work is every ten seconds while it lasts, however long one step of it takes.

    Args:
        sentence: What to say, given the seconds that are over.
        console: Where to.
        quiet: Say nothing.
    """
    if quiet:
        yield
        return
    start, over = time.monotonic(), threading.Event()

    def beat() -> None:
        while not over.wait(EVERY):
            tell(console, sentence(time.monotonic() - start))

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def shown_progress(label: str, quiet: bool) -> Iterator[Told]:
    """On standard error, a bar over scored tokens; where that is no terminal, a line every ten seconds and at the end.

    Args:
        label: What is measured; names in it bring no markup and no control sequence.
        quiet: Show nothing.
    """
    console = Console(stderr=True)
    if not quiet and not console.is_terminal:
        with _lines(label, console) as told:
            yield told
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=quiet) as bar:
        task = bar.add_task(printable(label), total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def _lines(label: str, console: Console) -> Iterator[Told]:
    at, start = [0, 0], time.monotonic()

    def words(seconds: float) -> str:
        return f"{label}: {at[0]:,} of {at[1]:,} tokens after {seconds:.0f} s"

    def told(done: int, total: int) -> None:
        at[:] = done, total
        if done >= total:
            tell(console, words(time.monotonic() - start))

    with beating(words, console):
        yield told
