"""The command `adaattn`: a table of subcommands, each imported when it is called.

A new command is a line in `COMMANDS`: its name, and `module:function` of a function that typer can read
(typed parameters, `typer.Option`, a docstring whose first line is the summary).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

import typer
from transformers.utils import logging
from typer.core import TyperGroup

COMMANDS: dict[str, str] = {
    "eval": "adaattn_hf.eval.command:evaluate",
    "explain": "adaattn_hf.eval.explain_command:explain",
    "calibrate": "adaattn_hf.calibration.command:calibrate",
    "plan": "adaattn_hf.plan_command:plan",
    "ablate": "adaattn_hf.eval.ablate:ablate",
    "bench": "adaattn_hf.eval.bench.command:bench",
}
"""Subcommand to the function that it calls."""


class LazyCommands(TyperGroup):
    """A group whose subcommands are imported on demand."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of the subcommands, in the table's order."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The subcommand of a name, None where there is none."""
        if cmd_name not in COMMANDS:
            return None
        module, _, function = COMMANDS[cmd_name].partition(":")
        one = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
        one.command(cmd_name)(getattr(importlib.import_module(module), function))
        command = typer.main.get_command(one)
        command.name = cmd_name
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Like typer's; an unknown name finds its nearest among the table's."""
        self.commands: Any = dict.fromkeys(COMMANDS)  # what typer draws its suggestions from
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=LazyCommands,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


@app.callback()
def adaattn() -> None:
    """Attention for Transformers models that is exact by default, and the evidence that it is."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; exits the process with the command's code."""
    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # a bar that nobody sees grow is a line of noise
    app(args=None if argv is None else list(argv), prog_name="adaattn")


if __name__ == "__main__":
    main()
