"""What the face offers, name by name and argument by argument: a change is seen before a user sees it."""

import contextlib
import dataclasses
import inspect
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import adaattn_hf

from ..support.source_tree import ROOT

SNAPSHOT = Path(__file__).with_name("public_api.txt")


def signature(function: Callable[..., Any]) -> str:
    with contextlib.suppress(ValueError):
        return str(inspect.signature(function))
    return "(...)"


def members(cls: type) -> Iterator[str]:
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


def untold(now: Mapping[str, str], released: Mapping[str, str]) -> bool:
    """Whether public names have changed since a release, and the changelog has not."""
    return now["public_api.txt"] != released["public_api.txt"] and now["CHANGELOG.md"] == released["CHANGELOG.md"]


def test_a_changed_name_is_told_in_the_changelog() -> None:
    """Since the last tag, where there is one."""
    files = {path.name: path for path in (SNAPSHOT, ROOT / "CHANGELOG.md")}

    def git(*words: str) -> str | None:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
        return None if done.returncode else done.stdout

    tag = git("describe", "--tags", "--abbrev=0", "--match", "v*") if (ROOT / ".git").exists() else None
    if tag is None:
        pytest.skip("no release: no tag, or no history")
    released = {name: git("show", f"{tag.strip()}:{path.relative_to(ROOT)}") or "" for name, path in files.items()}
    assert not untold({name: path.read_text(encoding="utf-8") for name, path in files.items()}, released)


def test_a_change_that_nobody_tells_is_found() -> None:
    released = {"public_api.txt": "load(path)", "CHANGELOG.md": "- load"}
    assert untold({**released, "public_api.txt": "load(file)"}, released)
    assert not untold({"public_api.txt": "load(file)", "CHANGELOG.md": "- load(file)"}, released)
    assert not untold({**released, "CHANGELOG.md": "- faster"}, released)


def test_a_changed_argument_changes_the_description() -> None:
    class Face:
        __all__ = ("load",)

        @staticmethod
        def load(path: str, *, strict: bool = True) -> None:
            """Loads."""

    before = describe(Face)
    assert before == "load(path: str, *, strict: bool = True) -> None\n"
    Face.load = staticmethod(lambda path: None)  # type: ignore[assignment,method-assign]
    assert describe(Face) != before
