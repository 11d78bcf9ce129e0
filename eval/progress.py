"""What a user sees while a command runs: lines, bars, and how far each stage of the work is."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from adaattn_hf._files import printable

EVERY = 10.0
"""Seconds between two lines where there is no terminal."""
TELLING = 0.05
"""Share of a stage that tells how long the rest takes."""
Progress = Callable[[str, int, int], None]
"""Told of a stage: its name, the steps done and the number of steps."""


def silent(*words: object) -> None:
    """Ignores progress and messages."""


def duration(seconds: float) -> str:
    """Returns a time in words."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def tell(console: Console, *lines: str) -> None:
    """Prints lines as they are: names in them bring no markup, no colour and no control sequence."""
    for line in lines:
        console.print(printable(line), markup=False, highlight=False, soft_wrap=True)


@contextmanager
def beating(sentence: Callable[[float], str], console: Console, *, quiet: bool = False) -> Iterator[None]:
    """Says how far the work is every ten seconds while it lasts, however long one step of it takes."""
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


class Display:
    """Told of progress, it moves bars on a terminal; elsewhere it writes a line where a stage ends."""

    def __init__(self, console: Console, bars: Bars | None, quiet: bool) -> None:
        self._stage = ""  # the one that was told of last
        self._console, self._bars, self._quiet = console, bars, quiet
        self._tasks: dict[str, TaskID] = {}
        self._start = self._since = time.monotonic()
        self._first = self._part = 0.0  # shares of the stage: done before the first word of it, done now

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Take note that `done` of `total` steps of a stage are done."""
        part = done / total if total else 1.0
        if again := stage != self._stage or part < self._part:
            self._stage, self._since, self._first, self._part = stage, time.monotonic(), part, 0.0
        finished, self._part = part >= 1.0 > self._part, part
        if self._bars is not None:
            if stage not in self._tasks:
                self._tasks[stage] = self._bars.add_task(printable(stage), total=total)
            elif again:  # a bar that was full says that no time is left
                self._bars.reset(self._tasks[stage])
            self._bars.update(self._tasks[stage], completed=done, total=total)
        elif finished and not self._quiet:
            tell(self._console, self.line())

    def line(self, _: float = 0.0) -> str:
        """How far the stage is, and the time that is left of it, if what is done tells."""
        now, part, read = time.monotonic(), self._part, self._part - self._first
        how_far = "done" if part >= 1.0 else f"{100 * part:.0f} %"
        left = f", {duration((now - self._since) * (1.0 - part) / read)} left" if read >= TELLING and part < 1.0 else ""
        return f"{self._stage or 'beginning'}: {how_far} after {now - self._start:.0f} s{left}"


@contextmanager
def shown_progress(console: Console, *, quiet: bool = False) -> Iterator[Display]:
    """Yields what is to be told of progress: bars on a terminal, elsewhere a line every ten seconds."""
    if quiet or not console.is_terminal:
        display = Display(console, None, quiet)
        with beating(display.line, console, quiet=quiet):
            yield display
        return
    named = TextColumn("{task.description}", markup=False)
    shown = BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Bars(named, *shown, console=console) as bars:
        yield Display(console, bars, quiet)
