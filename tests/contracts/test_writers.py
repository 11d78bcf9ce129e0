"""Names and texts from outside reach no page, no Markdown and no terminal as markup; and no writer is overlooked."""

import ast
import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from adaattn_cli.ending import leave
from adaattn_cli.pictures import headline, page
from adaattn_cli.pictures.headline import print_plan
from adaattn_hf.errors import EvalError
from adaattn_hf.eval import pages, progress
from adaattn_hf.eval.bench import report as bench

from ..unit.test_plan import make_plan

NASTY = "\x1b]0;owned\x07\x9b31m</script><img src=x>|[red](x)"
ROOMS = ("adaattn_hf", "adaattn_cli", "patches", "configs", "eval")


def benched() -> dict[str, Any]:
    half = {"median": 0.5, "quartile_25": 0.5, "quartile_75": 0.5}
    ratio = {"wall": half, "process": half}
    cell = {
        "title": NASTY, "level": "attention", "commit": NASTY, "times": {"adaattn": ratio}, "best": NASTY,
        "ratios": {NASTY: half}, "ratio_best": ratio, "peak_bytes": {NASTY: 1},
        "refused": {NASTY: NASTY},
    }  # fmt: skip
    made = {
        "versions": {NASTY: NASTY}, "cpu": NASTY, "cores": 1, "threads": 1, "device": NASTY, "driver": NASTY,
        "python": NASTY,
    }  # fmt: skip
    return {"provenance": made, "cells": [cell], "rounds": 1, "slower": NASTY, "absent": {NASTY: NASTY}}


def planned() -> Any:
    proof = make_plan().verified
    assert proof is not None
    return make_plan(model_type=NASTY, torch=NASTY, protocol={"scoring": {"predicts": NASTY}})


def shown(renderable: Any) -> str:
    console = Console(width=400, record=True, color_system=None)
    with console.capture() as captured:
        console.print(renderable, markup=False) if isinstance(renderable, str) else console.print(renderable)
    return captured.get()


def printed(write: Callable[[Console], None]) -> str:
    console = Console(width=400, color_system=None, file=io.StringIO())
    write(console)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def progressed(terminal: bool | None) -> str:
    """What an evaluation of a model of that name writes while it runs."""
    made = Console(width=400, color_system=None, file=io.StringIO(), force_terminal=terminal, _environ={"TERM": "x"})
    with progress.shown_progress(made) as told:
        told(f"{NASTY} on text", 1, 1)
    text = str(made.file.getvalue())  # type: ignore[attr-defined]
    # a bar moves the cursor, and nothing else
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text) if terminal else text


def explored() -> str:
    stop = {"name": NASTY, "loss": 0.0, "speed": 1.0, "picks": [0], "risk": [0.0], "time": [1.0], "proof": None}
    return page.page(
        {
            "title": NASTY, "under": [NASTY], "about": [NASTY], "rows": [0], "width": 1,
            "choices": [NASTY], "stops": [stop], "start": 0,
        }
    )  # fmt: skip


PAGES: dict[str, Callable[[], str]] = {
    "atlas": lambda: pages.atlas({"layers": [], "maps": [], NASTY: [NASTY]}, NASTY, NASTY),
    "explorer": explored,
    "plan": lambda: page.plan_page(planned()),
}
MARKDOWN: dict[str, Callable[[], str]] = {"benchmark": lambda: bench.markdown(benched(), NASTY)}
TERMINAL: dict[str, Callable[[], str]] = {
    "details of a plan": lambda: "\n".join(headline.details(planned())),
    "headline of a plan": lambda: headline.name_of(planned()),
    "a plan": lambda: printed(lambda console: print_plan(console, planned(), headline.Speedups(), verbose=True)),
    "a line of a command": lambda: printed(lambda console: progress.tell(console, NASTY)),
    "progress of an evaluation": lambda: progressed(None),
    "its bar": lambda: progressed(True),
}
ELSEWHERE = {
    "adaattn_cli/app.py": "its own version; JSON escapes control characters; errors, in the tests here",
    "adaattn_cli/doctor.py": "escapes what it found, tests/unit/test_command_line.py",
    "adaattn_cli/eval.py": "eval/report.py", "adaattn_cli/explain.py": "class names of loaded code",
    "adaattn_cli/profile.py": "numbers, the atlas", "adaattn_cli/calibrate.py": "a plan's picture and page",
    "adaattn_hf/calibration/pricing.py": "the table stands in its docstring",
    "adaattn_hf/backends/native/build.py": "JSON escapes control characters",
    "eval/report.py": "tests/eval/test_report.py::test_names_bring_no_markup_and_no_escape_sequences",
    "eval/showcase.py": "models and texts of the package", "eval/bench/processes.py": "JSON for a process",
}  # fmt: skip
"""Modules that write to a terminal or a page and are not among the cases here: what they write, or who tests it."""
HERE = {
    "adaattn_cli/pictures/page.py", "adaattn_cli/pictures/headline.py", "eval/pages.py", "eval/bench/report.py",
    "eval/progress.py",
}  # fmt: skip


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_no_tag_of_a_name(name: str) -> None:
    text = PAGES[name]()
    assert "owned" in text
    assert not any(mark in text for mark in ("</script><img", "<img", "\x1b", "\x9b"))


@pytest.mark.parametrize("name", MARKDOWN)
def test_markdown_has_no_tag_link_or_cell_of_a_name(name: str) -> None:
    text = MARKDOWN[name]()
    assert "owned" in text
    assert not any(mark in text for mark in ("<img", "</script", "\x1b", "\x9b", "[red]"))
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert len(widths) == 1, widths


@pytest.mark.parametrize("name", TERMINAL)
def test_a_terminal_is_sent_no_control_sequence_of_a_name(name: str) -> None:
    text = TERMINAL[name]()
    assert "owned" in text
    assert not any(mark in text for mark in ("\x1b", "\x07", "\x9b"))


def test_an_error_spells_control_sequences_out(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BaseException, match=r"^\d*$"):
        leave(EvalError(f"model: got {NASTY}\nexpected another"))
    said = capsys.readouterr().err
    assert "owned" in said
    assert "[red](x)\nexpected" in said
    assert not any(mark in said for mark in ("\x1b]", "\x07", "\x9b"))


def writes(source: str) -> bool:
    """Whether a module fills a page, a table or a terminal."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name) and called.id in ("print", "Table"):
                return True
            if isinstance(called, ast.Attribute) and called.attr in ("echo", "print", "secho"):
                return True
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.endswith(".html") and " " not in node.value and len(node.value) > 5:
                return True
            if "---|" in node.value or node.value.startswith("|---"):
                return True
    return False


def modules(root: Path) -> Iterator[Path]:
    return (path for room in ROOMS for path in sorted((root / room).rglob("*.py")))


def test_every_writer_is_known(checkout: Path) -> None:
    found = {p.relative_to(checkout).as_posix() for p in modules(checkout) if writes(p.read_text(encoding="utf-8"))}
    assert found == HERE | set(ELSEWHERE), "a module writes what people read: add a case here, or say who tests it"


@pytest.mark.parametrize(
    "source", ["print(name)", "typer.echo(x)", "Table(title=name)", "f('new.html')", "x = '|---|'"]
)
def test_a_new_writer_would_be_noticed(source: str) -> None:
    assert writes(source)
    assert not writes("x = 1")
