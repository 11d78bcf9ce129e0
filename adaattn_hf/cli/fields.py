"""Makes command options from dataclass fields, so that name, type, default and help are written once.

    @dataclass(frozen=True)
    class Shown:
        '''How much is printed.

        Attributes:
            quiet: No progress.
        '''

        quiet: bool = False

    @with_options(shown=Shown)
    def command(model: ..., shown: Shown) -> None: ...

typer sees `--quiet` with that help instead of `shown`, and the function gets a `Shown`. A tuple field is an option that
may be given several times. The metadata of a field may hold: `option`, the option's name, or None for no option;
`least`, the smallest number; `read`, a function that parses text (given the text and the option's name); `choices`,
the allowed words, which the shell completes; `names`, files and a variable in them: its names replace the variable
in the help, and are allowed in addition to `choices`.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin, get_type_hints

import typer

from ..errors import UsageError
from .interrupt import leave

Command = TypeVar("Command", bound=Callable[..., Any])


def with_options(**groups: type[Any]) -> Callable[[Command], Command]:
    """Returns a decorator that replaces parameters by options, the fields of their dataclasses.

    A mistake in these options ends the command with an error and exit code 2.
    """

    def changed(function: Command) -> Command:
        @functools.wraps(function)
        def command(**values: Any) -> Any:
            for name, group in groups.items():
                try:
                    values[name] = _made(group, values)
                except ValueError as error:
                    leave(UsageError(str(error)))
            return function(**values)

        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(function, eval_str=True).parameters.values():
            group = groups.get(parameter.name)
            parameters += [parameter] if group is None else _parameters(group)
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in parameters}
        return command  # type: ignore[return-value]

    return changed


def _options(group: type[Any]) -> list[dataclasses.Field[Any]]:
    """The fields that are options, with those of base classes last."""
    found = [field for field in dataclasses.fields(group) if field.metadata.get("option", "") is not None]
    return sorted(found, key=lambda field: field.name not in inspect.get_annotations(group))


def _made(group: type[Any], values: dict[str, Any]) -> Any:
    """Builds a dataclass from its options, and removes these from the values."""
    types, given = get_type_hints(group), {}
    for field in _options(group):
        value = values.pop(field.name)
        read = field.metadata.get("read")
        if value in (None, []) and field.default is not None:
            continue  # the default is the dataclass's own
        if read is not None and value is not None:
            value = read(value, _name(field).strip("-").replace("-", "_"))
        elif get_origin(types[field.name]) is tuple:
            value = tuple(value)
        elif isinstance(value, Enum):
            value = value.value
        given[field.name] = value
    return group(**given)


def _name(field: dataclasses.Field[Any]) -> str:
    return str(field.metadata.get("option") or f"--{field.name.replace('_', '-')}")


def _parameters(group: type[Any]) -> list[inspect.Parameter]:
    types, helps, found = get_type_hints(group), described(group), []
    for field in _options(group):
        kind, default, says = types[field.name], field.default, helps.get(field.name, "")  # -OO has no docstrings
        known = field.metadata
        # a flag is not said in two ways: what is off by default is turned on
        names = [_name(field)] if "option" in known or (kind is bool and default is False) else []
        if "read" in known:
            kind, default = str | None, None
        elif get_origin(kind) is tuple:
            kind, default = list[get_args(kind)[0]] | None, None  # type: ignore[misc]
        words = declared(*known["names"]) if "names" in known else ()
        short = "<int>" if "least" in known else None  # the table of help has no room for bounds, nor for all choices
        if "choices" in known:
            every = (*known["choices"], *words)
            chosen = cast(Any, Enum)(field.name, [(word, word) for word in every])
            says, short = f"{says} One of {', '.join(every)}.", "<word>"
            kind, default = (chosen | None, None) if default is None else (chosen, chosen(default))
        elif words:
            says = says.replace(f"`{known['names'][1]}`", ", ".join(words))
        option = typer.Option(*names, help=says, min=known.get("least"), metavar=short)
        found.append(
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
            )
        )
    return found


def described(group: type[Any]) -> dict[str, str]:
    """Returns the description of each field, from the Attributes sections of a dataclass and its bases."""
    found: dict[str, str] = {}
    for one in reversed(group.__mro__):
        text = inspect.cleandoc(one.__dict__.get("__doc__") or "").partition("\nAttributes:\n")[2]
        for entry in re.split(r"(?:^|\n)    (?=\w+: )", text.partition("\n\n")[0])[1:]:
            name, _, says = entry.partition(": ")
            found[name] = " ".join(says.split())
    return found


def declared(files: str, name: str) -> tuple[str, ...]:
    """Returns the names that files of the package, such as `plans/choices/*.py`, assign to a variable.

    They are read from the source, because importing would load torch, and help must be fast.
    """
    found: list[str] = []
    for path in sorted(Path(__file__).parents[1].glob(files)):
        known: dict[str, ast.expr] = {}
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                value = node.value
                # a class may name a tuple of its module
                known[node.targets[0].id] = known.get(value.id, value) if isinstance(value, ast.Name) else value
        if name in known:
            found += ast.literal_eval(known[name])
    return tuple(found)
