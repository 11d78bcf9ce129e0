"""What the face offers, name by name and argument by argument: a change is seen before a user sees it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import adaattn_hf

SNAPSHOT = Path(__file__).with_name("public_api.txt")


def signature(function: Callable[..., Any]) -> str:
    """Its arguments, as they are written."""
    try:
        return str(inspect.signature(function))
    except ValueError:
        return "(...)"


def members(cls: type) -> Iterator[str]:
    """Fields, methods and properties that the package itself defines."""
    if dataclasses.is_dataclass(cls):
        for field in dataclasses.fields(cls):
            default = "" if field.default is dataclasses.MISSING else f" = {field.default!r}"
            yield f"  {field.name}: {field.type}{default}"
    for name, value in sorted(vars(cls).items()):
        if name.startswith("_"):
            continue
        if isinstance(value, property):
            yield f"  {name} (property)"
        elif isinstance(value, (classmethod, staticmethod)):
            yield f"  {name}{signature(value.__func__)} ({type(value).__name__})"
        elif inspect.isfunction(value):
            yield f"  {name}{signature(value)}"


def describe(module: Any) -> str:
    """One line for every public name, indented ones for what a class holds."""
    lines = []
    for name in sorted(module.__all__):
        value = getattr(module, name)
        if inspect.isclass(value):
            bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
            lines += [f"class {name}({bases})", *members(value)]
        elif callable(value):
            lines.append(f"{name}{signature(value)}")
        else:
            lines.append(f"{name}: {type(value).__name__}")
    return "\n".join(lines) + "\n"


def test_public_names_are_those_recorded(snapshot: Callable[[Path, str], None]) -> None:
    snapshot(SNAPSHOT, describe(adaattn_hf))


def test_everything_public_is_documented() -> None:
    undocumented = [
        name
        for name in adaattn_hf.__all__
        if callable(getattr(adaattn_hf, name)) and not (getattr(adaattn_hf, name).__doc__ or "").strip()
    ]
    assert undocumented == []


def test_a_changed_argument_changes_the_description() -> None:
    """The comparison can fail."""

    class Face:
        __all__ = ("load",)

        @staticmethod
        def load(path: str, *, strict: bool = True) -> None:
            """Loads."""

    before = describe(Face)
    assert before == "load(path: 'str', *, strict: 'bool' = True) -> 'None'\n"
    Face.load = staticmethod(lambda path: None)  # type: ignore[assignment,method-assign]
    assert describe(Face) != before
