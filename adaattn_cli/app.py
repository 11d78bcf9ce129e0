"""The command `adaattn` as typer shows it; what a command does is imported when it runs.

Nothing of `adaattn_hf` is imported before, as that would import Transformers: help, version, completion and mistakes in
options answer at once.
"""

import contextlib
import importlib
import inspect
import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .commands import COMMANDS, GROUPS
from .options import Command, Done

HELP_NAMES = {"help_option_names": ["--help", "-h"]}


def group(**options: Any) -> typer.Typer:
    """Returns an empty group of commands."""
    return typer.Typer(
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings=HELP_NAMES,
        **options,
    )


def add(parent: typer.Typer, name: str, made: Command) -> None:
    """Adds a command to a group, by what is typed, `plan show` say."""

    def command(**values: Any) -> None:
        execute(name, made, values)

    parameters = made.parameters()
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    # a paragraph is one line: it is the terminal that knows where it breaks
    text, codes, ends = re.sub(r"(?<=\S)\n(?=\S)", " ", inspect.cleandoc(made.help)).partition("Exit codes:")
    settings: dict[str, Any] = {**HELP_NAMES}
    if any(one.name is None and one.kind == list[str] for one in made.options.values()):
        # another program's words, whose options are its own
        settings |= {"allow_interspersed_args": False, "ignore_unknown_options": True}
    shown: Any = {"help": text.rstrip(), "epilog": codes + ends, "context_settings": settings}
    parent.command(name.rpartition(" ")[2], **shown)(command)


def execute(name: str, command: Command, values: dict[str, Any]) -> None:
    """Runs a command: reads its options, imports what does it, prints its JSON and ends with its exit code."""
    try:
        options = command.read(values)
    except ValueError as error:
        Console(stderr=True, style="red").print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error
    module, _, function = name.partition(" ")
    if name != "run" and not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # a library's bar that nobody sees grow is a line of noise
    as_json = getattr(options, "as_json", False)
    with _printing() if name != "run" else contextlib.nullcontext():
        # models and data sets may print
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            try:
                work = importlib.import_module(f"adaattn_cli.{module}")
            except KeyboardInterrupt as error:
                typer.echo("interrupted before anything was begun", err=True)
                raise typer.Exit(130) from error
            done: Done = getattr(work, function or "run")(options)
        if as_json and done.result is not None:
            from adaattn_hf._files import json_text

            typer.echo(done.result if isinstance(done.result, str) else json_text(done.result, indent=1))
    raise typer.Exit(done.code)


@contextlib.contextmanager
def _printing() -> Iterator[None]:
    """Context manager: what cannot be printed, as the disk of `> FILE` is full, ends the command with a sentence."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno is None or error.filename is not None or isinstance(error, BrokenPipeError):
            raise  # a library that does not load, a file, what typer ends
        sys.stdout = None  # Python would try again at its end, and say so in its own words
        typer.echo(f"error: standard output: {error.strerror}; print to a place that has room", err=True)
        raise typer.Exit(3) from error


def _print_version(asked: bool) -> None:
    if asked:
        # of the source that runs, which need not be what was installed
        source = (Path(__file__).parents[1] / "adaattn_hf" / "__init__.py").read_text(encoding="utf-8")
        typer.echo(f"adaattn-hf {source.partition('__version__ = ')[2].split()[0].strip(chr(34))}")
        raise typer.Exit


app = group()


@app.callback()
def adaattn(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Faster attention for Transformers: exact by default, or within a loss budget that you set."""


_groups = {"": app, **{name: group(add_completion=False, help=text) for name, text in GROUPS.items()}}
for _name in GROUPS:
    app.add_typer(_groups[_name], name=_name)
for _name, _command in COMMANDS.items():
    add(_groups[_name.rpartition(" ")[0]], _name, _command)


def run(argv: Sequence[str] | None = None) -> None:
    """Run the command line; exits the process with the command's code."""
    for name in ("stdin", "stdout", "stderr"):  # in the order of their numbers, which the next files would get
        if getattr(sys, name) is None:  # `2>&-`, say: libraries write to it unasked
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a pipe on Windows, say, has no Δ
            stream.reconfigure(errors="backslashreplace")
    app(args=None if argv is None else list(argv), prog_name="adaattn")
