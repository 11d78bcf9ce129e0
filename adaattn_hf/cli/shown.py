"""What a command shows of its work: options that several commands share."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.console import Console

from .fields import says


@dataclass(frozen=True)
class Shown:
    """How much is printed.

    Attributes:
        verbose: Also what stands behind the headline: nats, levels, versions.
        quiet: No progress.
    """

    verbose: bool = field(default=False, metadata=says("Print nats, levels and versions, too."))
    quiet: bool = field(default=False, metadata=says("No progress."))


def tell(console: Console, line: str) -> None:
    """Prints a line as it is: names in it bring no markup, no colour and no control sequence."""
    from ..plans.wording import printable

    console.print(printable(line), markup=False, highlight=False, soft_wrap=True)
