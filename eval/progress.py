"""What a user sees while a command runs: lines, bars, and how far the work is.

The time left is the time spent divided by the share of the work that is done, or what was expected before any was.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from adaattn_hf._files import printable

EVERY = 10.0
"""Seconds between two lines where there is no terminal."""
TELLING = 0.05
"""Share of the work that tells how long the rest takes."""
Progress = Callable[[str, int, int], None]
"""Told of a stage: its name, the steps done and the number of steps."""


def silent(*words: object) -> None:
    """Ignores progress and messages."""


def duration(seconds: float) -> str:
    """Returns a time in words."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def tell(console: Console, line: str) -> None:
    """Prints a line as it is: names in it bring no markup, no colour and no control sequence."""
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
    """Told of progress, it moves bars on a terminal; elsewhere it writes a line where a stage ends.

    `work` of a stage is in any unit until `expect` tells it in seconds; `stage` is empty before the first.
    """

    def __init__(self, work: Mapping[str, float], console: Console, bars: Bars | None, quiet: bool) -> None:
        self.work = dict(work)
        self.done = dict.fromkeys(work, 0.0)
        self.stage = ""
        self._console, self._bars, self._quiet = console, bars, quiet
        self._start = self._since = self._told = time.monotonic()
        self._sure, self._past = False, 0.0
        self._tasks: dict[str, TaskID] = {}
        self._whole = bars.add_task("in all", total=1.0, left="") if bars and len(work) > 1 else None

    def expect(self, seconds: Mapping[str, float]) -> None:
        """Takes note of how long some stages will take from now on; what they did before stays done."""
        if not self._sure:
            self._sure, self._since = True, time.monotonic()
            if self._bars is not None and self._whole is None:
                self._whole = self._bars.add_task("in all", total=1.0, left="")
        for stage, work in seconds.items():
            self._past += self.work.get(stage, 0.0) * self.done.get(stage, 0.0)
            self.work[stage], self.done[stage] = work, 0.0

    @property
    def share(self) -> float:
        """Share of all work that is done."""
        done = self._past + sum(self.work[stage] * part for stage, part in self.done.items())
        return done / max(self._past + sum(self.work.values()), 1e-9)

    def left(self) -> str:
        """The time left in words, empty while too little is done to tell."""
        if self.share >= TELLING:
            seconds = (self._told - self._since) * (1.0 - self.share) / self.share
            return f"{duration(max(seconds - (time.monotonic() - self._told), seconds / 2))} left"
        return f"{duration((1.0 - self.share) * sum(self.work.values()))} left" if self._sure else ""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Take note that `done` of `total` steps of a stage are done."""
        part, self._told = done / total if total else 1.0, time.monotonic()
        finished = part >= 1.0 > self.done.get(stage, 0.0)
        self.stage, self.done[stage] = stage, part
        self.work.setdefault(stage, 0.0)
        if self._bars is not None:
            if stage not in self._tasks:
                self._tasks[stage] = self._bars.add_task(printable(stage), total=total, left="")
            alone = self.left() if self._whole is None else ""
            self._bars.update(self._tasks[stage], completed=done, total=total, left=alone)
            if self._whole is not None:
                self._bars.update(self._whole, completed=self.share, left=self.left())
        elif finished and not self._quiet:
            tell(self._console, self.line())

    def line(self, _: float = 0.0) -> str:
        """How far the stage is that was told of last, and the time left."""
        spent, left = time.monotonic() - self._start, self.left()
        part = self.done.get(self.stage, 0.0)
        how_far = "done" if part >= 1.0 else f"{100 * part:.0f} %"
        return f"{self.stage or 'beginning'}: {how_far} after {spent:.0f} s{left and f', {left}'}"


@contextmanager
def shown_progress(work: Mapping[str, float], console: Console, *, quiet: bool = False) -> Iterator[Display]:
    """Yields what is to be told of progress: bars on a terminal, elsewhere a line every ten seconds."""
    if quiet or not console.is_terminal:
        display = Display(work, console, None, quiet)
        with beating(display.line, console, quiet=quiet):
            yield display
        return
    named, left = TextColumn("{task.description}", markup=False), TextColumn("{task.fields[left]}")
    with Bars(named, BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), left, console=console) as bars:
        yield Display(work, console, bars, quiet)
