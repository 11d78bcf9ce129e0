"""Options from the fields of a dataclass: name, type, default and help of an option are said once, where it is kept.

    @dataclass(frozen=True)
    class Shown:
        quiet: bool = field(default=False, metadata=says("No progress."))

    @with_options(shown=Shown)
    def command(model: ..., shown: Shown) -> None: ...

typer sees `--quiet` in the place of `shown`, and the function is given a `Shown`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

Command = TypeVar("Command", bound=Callable[..., Any])


def says(text: str) -> dict[str, str]:
    """Returns the metadata of a field that is an option: `--its-name`, a flag where its type is bool."""
    return {"help": text}


def with_options(**groups: type[Any]) -> Callable[[Command], Command]:
    """Returns a decorator: the fields of a dataclass become options in the place of the parameter of that name."""

    def changed(function: Command) -> Command:
        @functools.wraps(function)
        def command(**values: Any) -> Any:
            for name, group in groups.items():
                mine = {field.name: values.pop(field.name) for field in dataclasses.fields(group)}
                values[name] = group(**mine)
            return function(**values)

        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(function, eval_str=True).parameters.values():
            group = groups.get(parameter.name)
            parameters += [parameter] if group is None else _parameters(group)
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in parameters}
        return command  # type: ignore[return-value]

    return changed


def _parameters(group: type[Any]) -> list[inspect.Parameter]:
    """The fields of a dataclass as parameters that typer reads."""
    types = get_type_hints(group)
    found = []
    for field in dataclasses.fields(group):
        # a flag is not said in two ways: what is off by default is turned on
        names = [f"--{field.name.replace('_', '-')}"] if types[field.name] is bool else []
        kind: Any = Annotated[types[field.name], typer.Option(*names, help=field.metadata["help"])]  # type: ignore[valid-type, name-defined]
        found.append(
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=kind
            )
        )
    return found
