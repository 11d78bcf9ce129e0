"""What a user sees while an evaluation runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
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

if TYPE_CHECKING:
    from .runner import Progress as Tell

EVERY = 60.0
"""Seconds between two lines where there is no terminal."""


@contextmanager
def shown_progress(label: str, quiet: bool) -> Iterator[Tell]:
    """On standard error, a bar over scored tokens; where that is no terminal, a line a minute and one at the end."""
    console = Console(stderr=True)
    if not quiet and not console.is_terminal:
        yield _lines(label, console)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=quiet) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(label: str, console: Console) -> Tell:
    start = last = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done >= total or now - last >= EVERY:
            last = now
            words = f"{label}: {done:,} of {total:,} tokens after {now - start:.0f} s"
            console.print(words, markup=False, highlight=False, soft_wrap=True)

    return tell
