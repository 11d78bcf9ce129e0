"""How a command says its options: by name, each with its kind, its default and its help.

    COPY = Command(
        '''Copy a file.

        Exit codes: 0 done; 2 wrong arguments.
        ''',
        file=argument(Path, ..., "File to copy."),
        times=Option(int, 1, "Copies to make.", least=1),
    )

Nothing here loads torch, so that help and mistakes in options do not wait for it.
"""

import dataclasses
import inspect
import os
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, NamedTuple, TypeVar, cast

import typer

Settings = TypeVar("Settings")
PLAN_DIRECTORY = "adaattn-plan"
"""Where a plan goes, and where commands look for one, if nothing is said."""
DEMO_DIRECTORY = "adaattn-plan-demo"
"""Where that of the packaged model goes: commands do not take it for the plan of another model."""
FAMILIES = ("window", "bf16", "int8", "rank")


class Done(NamedTuple):
    """How a command ended: what `--json` prints, JSON text or a value, None for nothing; and the exit code."""

    result: Any = None
    code: int = 0


class Options(SimpleNamespace):
    """What was typed: an attribute for each option of a command, its default where it was not given."""

    def fill(self, settings: Callable[..., Settings], **others: Any) -> Settings:
        """Returns settings whose fields are the options of the same names, where these were given, or `others`."""
        names = [one.name for one in dataclasses.fields(cast(Any, settings))]
        typed = {name: value for name in names if (value := getattr(self, name, None)) not in (None, ())}
        return settings(**{**typed, **others})

    def source(self) -> dict[str, Any]:
        """What says which checkpoint, where it is given, as Transformers takes it."""
        names = ("revision", "gguf_file", "trust_remote_code")
        return {name: value for name in names if (value := getattr(self, name))}

    def loading(self) -> dict[str, Any]:
        """What says how a checkpoint is loaded, as `patches.checkpoint.load` takes it."""
        names = ("device", "dtype", "tokenizer", "objective")
        return self.source() | {name: getattr(self, name) for name in names}


class Option(NamedTuple):
    """An option of a command.

    Attributes:
        kind: Type of its value; what is a list may be given several times, and becomes a tuple.
        default: Value where it is not given; `...` has none.
        text: What `--help` says of it.
        name: What is typed, where it is not `--` and its name; None for an argument, which is found by its place.
        choices: The words that it takes, which the shell completes.
        read: Makes the value of the text and of the option's name; ValueError for what it cannot read.
        least: The smallest number that it takes.
    """

    kind: Any
    default: Any
    text: str
    name: str | None = ""
    choices: tuple[str, ...] = ()
    read: Callable[[str, str], Any] | None = None
    least: int | None = None


def argument(kind: Any, default: Any, text: str) -> Option:
    """Returns an argument, which is found by its place."""
    return Option(kind, default, text, None)


class Command:
    """A command by its help, whose last paragraph says the exit codes, and its options.

    `panels` are titles of parts of the help page with the options in them, in order; what none names is in the last
    part. `check` refuses options that do not go together (ValueError), and may add what follows from them.
    """

    def __init__(
        self,
        help: str,
        panels: Mapping[str, tuple[str, ...]] | None = None,
        check: Callable[[Options], None] | None = None,
        /,
        **options: Option,
    ) -> None:
        self.help, self.panels, self.check, self.options = help, panels or {}, check, options

    def __call__(self, **values: Any) -> Options:
        """Returns options, with defaults for those that are not given; ValueError for a mistake in them."""
        if unknown := values.keys() - self.options.keys():
            raise TypeError(f"options: got {', '.join(sorted(unknown))}, expected some of {', '.join(self.options)}")
        options = Options(**{name: values.get(name, one.default) for name, one in self.options.items()})
        if self.check is not None:
            self.check(options)
        return options

    def read(self, values: Mapping[str, Any]) -> Options:
        """Returns the options that typer read; ValueError for a mistake in them."""
        typed = {}
        for name, value in values.items():
            if value is None or value == []:
                continue
            one = self.options[name]
            if (read := one.read or (path if one.kind in (Path, list[Path]) else None)) is not None:
                said = (one.name or name).strip("-").replace("-", "_")
                value = [read(text, said) for text in value] if isinstance(value, list) else read(value, said)
            typed[name] = tuple(value) if isinstance(value, list) else getattr(value, "value", value)
        return self(**typed)

    def parameters(self) -> list[inspect.Parameter]:
        """The options as parameters of a function, as typer reads them: by panels, then the others."""
        panels, parameters = {name: panel for panel, names in self.panels.items() for name in names}, []
        for name in dict.fromkeys((*panels, *self.options)):
            kind, default, text, typed, choices, read, least = self.options[name]
            # the table of help has no room for bounds, and a flag takes no value
            metavar = "<int>" if least is not None else "" if kind is bool else None
            if choices:
                kind = cast(Any, Enum)(name, [(word, word) for word in choices])
                text, metavar = f"{text} One of {', '.join(choices)}.", "<word>"
                default = None if default is None else kind(default)
            if kind in (Path, list[Path]) and typed is not None:  # as text: typer's path of nothing is that of `.`
                kind, metavar = str if kind is Path else list[str], "<path>"
            if read is not None or default == ():
                kind, default = kind if read is None else str, None
            if typed is None:
                info: Any = typer.Argument(help=text)
            else:
                # a flag is not said in two ways: what is off by default is turned on
                typed = typed or (f"--{name.replace('_', '-')}" if default is False else "")
                panel = panels.get(name, "Advanced" if panels else None)
                info = typer.Option(
                    *filter(None, [typed]), help=text, min=least, metavar=metavar, rich_help_panel=panel
                )
            kind = Annotated[kind | None if default is None else kind, info]
            default = inspect.Parameter.empty if default is ... else default
            parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind))
        return parameters


def path(text: str, name: str) -> Path:
    """Returns a path, with `~` for the home directory, which no shell sees behind `=`; ValueError for an empty one."""
    if not text:
        raise ValueError(f"{name} is '', expected a path; give . for this directory, or leave it out")
    return Path(os.path.expanduser(text))


def tokens(text: str, name: str = "lengths") -> tuple[int, ...]:
    """Returns length bins: `4096,8192`, or `4k,8k` for the same; ValueError for what is no number of tokens."""
    lengths = []
    for part in text.split(","):
        number = part.strip().lower()
        digits = number.removesuffix("k")
        if not (digits.isdecimal() and len(digits) < 20):  # Python reads no number of thousands of digits
            raise ValueError(
                f"{name} is {text!r:.80}, expected numbers of tokens by commas, such as 4096,8192 or 4k,8k"
            )
        lengths.append(int(digits) * (1024 if digits != number else 1))
    return tuple(lengths)


def share(text: str, name: str) -> float:
    """Returns a share as people write it: `40%`, `0.4` or `0.4x`; all else is a ValueError."""
    number = text.strip()
    unit, parts = ("%", 100.0) if number.endswith("%") else ("x", 1.0)
    try:
        return float(number.removesuffix(unit)) / parts
    except ValueError as error:
        raise ValueError(f"{name} is {text!r}, expected a share such as 99%, 0.99 or 0.99x") from error


def words(text: str, name: str) -> tuple[str, ...]:
    """Returns words by commas, `window,bf16` say; ValueError if there is none."""
    parts = tuple(part.strip() for part in text.split(",") if part.strip())
    if not parts:
        raise ValueError(f"{name} is {text!r}, expected some of {','.join(FAMILIES)}")
    return parts
