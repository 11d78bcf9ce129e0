"""`adaattn plan`: a plan as a picture, and what two plans differ in."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from ..plans.plan import Plan, PlanError
from ..plans.render import differences, heat_map, printable, save_html, save_png, summary
from ..plans.store import read_plan

app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False, no_args_is_help=True)
PlanPath = Annotated[Path, typer.Argument(help="A plan, or the directory of a model that carries one.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a picture.")]


@app.callback()
def plan() -> None:
    """Show a plan as a picture of layers by heads, or what two plans differ in."""


@app.command()
def show(
    path: PlanPath,
    png: Annotated[Path | None, typer.Option(help="Also write the picture to this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Also write what is shown to this page.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show a plan as a picture of layers by heads, with its budget and its proof.

    Files are written before anything is printed. Exit codes: 0 done; 2 wrong arguments, or no plan.
    """
    try:
        if png is not None and importlib.util.find_spec("matplotlib") is None:
            raise PlanError("--png needs matplotlib; pip install matplotlib")
        shown = read_plan(path)
        for name, target, save in (("--png", png, save_png), ("--html", html, save_html)):
            if target is not None:
                _draw(name, save, shown, target)
    except PlanError as error:
        _leave(error)
    if as_json:
        typer.echo(shown.to_json())
        return
    console = Console()
    console.print(heat_map(shown))
    for line in summary(shown):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


@app.command()
def diff(path: PlanPath, other: PlanPath, as_json: AsJson = False) -> None:
    """List the heads that two plans treat differently.

    Exit codes: 0 done; 2 wrong arguments, or no plan.
    """
    try:
        changed = differences(read_plan(path), read_plan(other))
    except PlanError as error:
        _leave(error)
    if as_json:
        units = [
            {"layer": layer, "head": head, "first": left.to_dict(), "second": right.to_dict()}
            for layer, head, left, right in changed
        ]
        typer.echo(json.dumps(units, indent=2))
        return
    for layer, head, left, right in changed:
        typer.echo(f"layer {layer} head {head}: {left.label} -> {right.label}")
    typer.echo(f"{len(changed)} units differ")


def _leave(error: PlanError) -> NoReturn:
    console = Console(stderr=True)
    console.print(
        f"error: {printable(str(error))}", style="red", markup=False, highlight=False, soft_wrap=True
    )
    raise typer.Exit(2) from error


def _draw(name: str, save: Callable[[Plan, Path], None], drawn: Plan, target: Path) -> None:
    if not target.parent.is_dir():
        raise PlanError(
            f"{name}: the directory {target.parent} does not exist; make it, or give a file in one that does"
        )
    try:
        save(drawn, target)
    except OSError as error:
        raise PlanError(
            f"{name}: {target} cannot be written ({error.strerror}); give a file in a directory that can"
        ) from error
