"""The command `adaattn`: a table of subcommands, each imported when it is called.

A new command is a line in `COMMANDS`: its name, and `adaattn_hf.cli.MODULE:function` of a function that typer can read
(typed parameters, `typer.Option`, a docstring whose first line is the summary and whose last paragraph has the exit
codes). A module with an `app` is a group; one with `PANELS` (title to names) has its options in panels.

Nothing of the package is imported here, so that version and completion do not wait for torch. Help of a subcommand and
mistakes in its options do not either: a command's module imports what loads torch when its function is called.
"""

from __future__ import annotations

import functools
import importlib
import io
import os
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

COMMANDS: dict[str, str] = {
    "eval": "adaattn_hf.cli.eval:evaluate",
    "profile": "adaattn_hf.cli.profile:profile",
    "explain": "adaattn_hf.cli.explain:explain",
    "calibrate": "adaattn_hf.cli.calibrate:calibrate",
    "verify": "adaattn_hf.cli.verify:verify",
    "plan": "adaattn_hf.cli.plan:plan",
    "bench": "adaattn_hf.cli.bench:bench",
    "doctor": "adaattn_hf.cli.doctor:doctor",
    "run": "adaattn_hf.cli.run:run",
}
"""Subcommand to the function that it calls."""
PACKAGE = "adaattn_hf"
REST = "Advanced"
"""The panel of options that no other names."""


def load_command(name: str) -> Any:
    """The subcommand of a name, its module imported. Raises KeyError where there is no such subcommand."""
    module_name, _, function = COMMANDS[name].partition(":")
    module = importlib.import_module(module_name)
    group = getattr(module, "app", None)
    if group is None:
        group = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
        settings = getattr(module, "CONTEXT_SETTINGS", None)
        group.command(name, context_settings=settings)(getattr(module, function))
    command = typer.main.get_command(group)
    command.name = name
    panels = {name: panel for panel, names in getattr(module, "PANELS", {}).items() for name in names}
    order = [*panels]
    narrow = shutil.get_terminal_size().columns < 80
    for one in (command, *getattr(command, "commands", {}).values()):
        if narrow and not hasattr(one, "commands"):  # a table would cut off the names of options
            one.rich_markup_mode = None
        one.context_settings.setdefault("help_option_names", ["--help", "-h"])
        parameters = without_types(one.get_params(typer.Context(one, **one.context_settings)))
        for parameter in parameters if panels else ():
            if parameter.param_type_name == "option":
                parameter.rich_help_panel = panels.get(parameter.name, REST)
        one.params.sort(key=lambda known: order.index(known.name) if known.name in order else len(order))
        # a paragraph is one line: it is the terminal that knows where it breaks
        text, codes, ends = re.sub(r"(?<=\S)\n(?=\S)", " ", one.help or "").partition("Exit codes:")
        one.help, one.epilog = text.rstrip(), codes + ends
    return command


def outline(name: str) -> Any:
    """The subcommand with its options and help, or KeyError; the package is opened when it is called."""
    command = load_command(name)
    children = getattr(command, "commands", None)
    for child in children.values() if children else [command]:
        child.callback = functools.partial(called, name, child.name if children else None)
    return command


def called(name: str, child: str | None, /, **values: Any) -> Any:
    """Call a subcommand, or one of a group's, with its module imported as part of the package."""
    try:
        if name != "run" and not sys.stderr.isatty():
            os.environ.setdefault("TQDM_DISABLE", "1")  # a library's bar that nobody sees grow is a line of noise
        if not hasattr(sys.modules[PACKAGE], "__version__"):  # found by `adaattn_command`, and not executed
            for module in [module for module in sys.modules if module.partition(".")[0] == PACKAGE]:
                del sys.modules[module]
        command = load_command(name)
        if values.get("as_json"):
            importlib.import_module(f"{PACKAGE}.cli.json_output").libraries_aside()
    except KeyboardInterrupt as error:
        typer.echo("interrupted before anything was begun", err=True)
        raise typer.Exit(130) from error
    return (command.commands[child] if child else command).callback(**values)


def without_types(parameters: Iterable[Any]) -> list[Any]:
    """Returns the parameters, without a type in the help of flags, which take no value."""
    known = list(parameters)
    for parameter in known:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return known


class LazyCommands(TyperGroup):
    """A group whose subcommands are imported on demand."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Like typer's; flags without a type."""
        return without_types(super().get_params(ctx))

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of the subcommands, in the table's order."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The subcommand of a name, None where there is none."""
        return outline(cmd_name) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Like typer's; an unknown name finds its nearest among the table's."""
        self.commands: Any = dict.fromkeys(COMMANDS)  # what typer draws its suggestions from
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=LazyCommands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        # of the source that runs, which need not be installed
        source = (Path(__file__).parents[1] / "__init__.py").read_text(encoding="utf-8")
        typer.echo(f"adaattn-hf {source.partition('__version__ = ')[2].split()[0].strip(chr(34))}")
        raise typer.Exit


@app.callback()
def adaattn(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Faster attention for Transformers: exact by default, or within a loss budget that you set."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; exits the process with the command's code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a pipe on Windows, say, has no Δ
            stream.reconfigure(errors="backslashreplace")
    app(args=None if argv is None else list(argv), prog_name="adaattn")
