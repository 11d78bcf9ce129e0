"""Shows the progress of a calibration: its stages, and the time left.

The time left is the time spent divided by the share of the work done; work is counted in tokens through the
model, a backward pass as two. A plan that fails its verification makes the work longer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from adaattn_hf.eval.progress import beating

from ..calibration.settings import CalibrationSettings
from ..plans.wording import share


class Display:
    """Told of progress, it shows bars on a terminal and writes a line per finished stage elsewhere.

    Attributes:
        work: Passes of tokens through the model that each stage takes.
        done: Share of each stage that is done.
        stage: The stage that was told of last, empty before the first.
    """

    def __init__(
        self, settings: CalibrationSettings, console: Console, bars: Bars | None, quiet: bool
    ) -> None:
        s = settings
        tokens = float(sum(s.lengths))
        self.work = {
            "moments": tokens,
            "risk": tokens * s.sequences * (4 + 2 * s.labels),
            "prices": 4 * tokens,
            "joint": 4 * tokens * s.joint,
            **{f"verify {length}": 2.0 * length * (s.held_out + s.haystacks) for length in s.lengths},
        }
        self.done = dict.fromkeys(self.work, 0.0)
        self.stage = ""
        self._console, self._bars, self._quiet = console, bars, quiet
        self._start = time.monotonic()
        self._tasks = {"all": bars.add_task("calibration", total=1.0, left="")} if bars is not None else {}

    @property
    def share(self) -> float:
        """Share of all work that is done."""
        return sum(self.work[stage] * share for stage, share in self.done.items()) / sum(self.work.values())

    def left(self) -> str:
        """Returns the time left in words, empty while too little is done to tell."""
        share = self.share
        if share < 0.05:
            return ""
        seconds = (time.monotonic() - self._start) * (1.0 - share) / share
        return f"{seconds:.0f} s left" if seconds < 90 else f"{seconds / 60:.0f} min left"

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Takes note that `done` of `total` steps of a stage are done."""
        self.stage = stage
        part = done / total if total else 1.0
        finished = part >= 1.0 > self.done.get(stage, 0.0)
        self.done[stage] = part
        self.work.setdefault(stage, 0.0)
        if self._bars is not None:
            if stage not in self._tasks:
                self._tasks[stage] = self._bars.add_task(stage, total=total, left="")
            self._bars.update(self._tasks[stage], completed=done, total=total)
            self._bars.update(self._tasks["all"], completed=self.share, left=self.left())
        elif finished and not self._quiet:
            self._console.print(self.line(), markup=False, highlight=False)

    def line(self, _: float = 0.0) -> str:
        """Returns how far the stage is that was told of last, and the time left."""
        spent, left = time.monotonic() - self._start, self.left()
        done = self.done.get(self.stage, 0.0)
        how_far = "done" if done >= 1.0 else f"{share(done)}"
        return f"{self.stage or 'beginning'}: {how_far} after {spent:.0f} s{left and f', {left}'}"


@contextmanager
def display(settings: CalibrationSettings, console: Console, quiet: bool) -> Iterator[Display]:
    """Yields what is to be told of progress, bars on a terminal.

    Args:
        settings: Settings of the calibration, which say how much work there is.
        console: Where bars and lines go.
        quiet: Show nothing.
    """
    if quiet or not console.is_terminal:
        shown = Display(settings, console, None, quiet)
        with beating(shown.line, console, quiet=quiet):
            yield shown
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )  # fmt: skip
    with Bars(*columns, console=console) as bars:
        yield Display(settings, console, bars, quiet)
