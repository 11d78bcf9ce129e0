"""Options that several commands share, and their parsing; mistakes are reported before a model is loaded."""

from __future__ import annotations

import math
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..errors import UsageError

Threads = Annotated[int | None, typer.Option(help="CPU threads for torch.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Also print nats, levels and versions.")]


UNITLESS = 0.01
"""A bare number from here on may be meant in percent, and is refused."""
_BUDGET = re.compile(r"\s*(.*?)\s*(%|nats/token|nats|)\s*", re.DOTALL)
"""A number and its unit."""


def nats(budget: str) -> float:
    """Returns a budget in nats/token: `0.1%` is ln 1.001, `1e-3` or `1e-3nats` itself; ValueError for others."""
    number, unit = _BUDGET.fullmatch(budget).groups()  # type: ignore[union-attr]
    try:
        value = math.log1p(float(number) / 100.0) if unit == "%" else float(number)
    except ValueError as error:
        raise ValueError(
            f"budget is {budget!r}, expected a rise of the perplexity such as 0.1% or a loss in nats/token such as 1e-3"
        ) from error
    if not unit and UNITLESS <= value < 1.0:
        from ..plans.wording import allowed

        raise ValueError(
            f"budget is {budget!r}, expected a unit: write {number}% (a rise of the perplexity by {number} %) or "
            f"{number}nats (nats/token, a rise by {allowed(value).lstrip('+')})?"
        )
    if not 0.0 < value < 1.0:
        raise ValueError(
            f"budget is {budget!r}, expected more than 0 and less than 1 nat/token; a rise of the perplexity has a %, "
            "such as 1%"
        )
    return value


def folders(budgets: Sequence[str]) -> list[str]:
    """Returns the directory names of budgets, `0.1pct`, `0.001nats`; ValueError if one is none, or is named twice."""
    names: list[str] = []
    for text in budgets:
        nats(text)  # refuses what is none
        number, unit = _BUDGET.fullmatch(text).groups()  # type: ignore[union-attr]
        names.append(f"{float(number):g}{'pct' if unit == '%' else 'nats'}")
        if names[-1] in names[:-1]:
            raise ValueError(f"budget is {', '.join(budgets)}, expected each once; leave the second {text} out")
    return names


def tokens(text: str, argument: str = "lengths") -> tuple[int, ...]:
    """Returns length bins: `4096,8192`, or `4k,8k` for the same; ValueError for what is no number of tokens."""
    found = []
    for part in text.split(","):
        number = part.strip().lower()
        digits = number.removesuffix("k")
        if not digits.isdecimal():
            raise ValueError(
                f"{argument} is {text!r}, expected numbers of tokens by commas, such as 4096,8192 or 4k,8k"
            )
        found.append(int(digits) * (1024 if digits != number else 1))
    return tuple(found)


def writable(directory: Path, argument: str) -> None:
    """Refuses a directory that cannot be made or written to (UsageError); makes none, which a failure would leave."""
    there = next(place for place in (directory, *directory.absolute().parents) if os.path.lexists(place))
    try:
        # permissions do not say it all: nobody can make a file in /proc, on a full disk or on one mounted for reading
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        what = "written to" if directory.is_dir() else "made"
        raise UsageError(
            f"{argument}: {directory} cannot be {what} ({error.strerror}); give a directory that can be written"
        ) from error


def use_threads(threads: int | None) -> None:
    """Sets the number of torch's threads; `None` leaves it unchanged. Raises UsageError if it is less than 1."""
    import torch

    if threads is None:
        return
    if threads < 1:
        raise UsageError(f"threads is {threads}, expected at least 1")
    torch.set_num_threads(threads)
