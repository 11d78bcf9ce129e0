"""`adaattn plan`: a plan as a picture, and what two plans differ in."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from adaattn_hf.attach import read_plan
from adaattn_hf.plan import Plan, PlanError
from adaattn_hf.plan_picture import differences, heat_map, save_html, save_png, summary


def plan(
    action: Annotated[str, typer.Argument(help="show or diff.")],
    path: Annotated[Path, typer.Argument(help="A plan, or the directory of a model that carries one.")],
    other: Annotated[Path | None, typer.Argument(help="The second plan of diff.")] = None,
    png: Annotated[Path | None, typer.Option(help="Also write the picture of show to this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Also write what show says to this page.")] = None,
) -> None:
    """Show a plan as a picture of layers by heads, or what two plans differ in."""
    console, errors = Console(), Console(stderr=True)
    try:
        if action not in ("show", "diff"):
            raise PlanError(f"action is {action!r}, expected show or diff")
        if (action == "diff") != (other is not None):
            raise PlanError("diff takes two plans, show takes one")
        first = read_plan(path)
        for name, target in (("--png", png), ("--html", html)):
            if target is not None and other is not None:
                raise PlanError(f"{name} is the picture of show, got diff; leave it out")
        if png is not None and importlib.util.find_spec("matplotlib") is None:
            raise PlanError("--png needs matplotlib; pip install 'adaattn-hf[plot]'")
        if other is None:
            console.print(heat_map(first))
            for line in summary(first):
                console.print(line, markup=False, highlight=False, soft_wrap=True)
            for name, target, save in (("--png", png, save_png), ("--html", html, save_html)):
                if target is not None:
                    _draw(name, save, first, target)
            return
        changed = differences(first, read_plan(other))
    except PlanError as error:
        errors.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error
    for layer, head, left, right in changed:
        console.print(
            f"layer {layer} head {head}: {left.label} -> {right.label}", markup=False, highlight=False
        )
    console.print(f"{len(changed)} units differ", markup=False, highlight=False)


def _draw(name: str, save: Callable[[Plan, Path], None], drawn: Plan, target: Path) -> None:
    try:
        save(drawn, target)
    except OSError as error:
        raise PlanError(
            f"{name}: {target} cannot be written ({error.strerror}); give a file in a directory that can"
        ) from error
