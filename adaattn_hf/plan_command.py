"""`adaattn plan`: a plan as a picture, and what two plans differ in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from adaattn_hf.plan import Plan, PlanError
from adaattn_hf.plan_picture import differences, heat_map, save_png, summary


def read_plan(path: Path) -> Plan:
    """Returns the plan in a JSON file, or in the `config.json` or `adaattn_plan.json` of a model directory.

    Raises:
        PlanError: If there is none.
    """
    file = path
    if path.is_dir():
        file = path / "adaattn_plan.json" if (path / "adaattn_plan.json").is_file() else path / "config.json"
    if not file.is_file():
        raise PlanError(
            f"{file} does not exist; expected a plan, or a directory that `adaattn calibrate` wrote"
        )
    text = file.read_text(encoding="utf-8")
    if file.name != "config.json":
        return Plan.from_json(text)
    data = (json.loads(text).get("adaattn") or {}).get("plan")
    if data is None:
        raise PlanError(f"{file} carries no plan; make one with `adaattn calibrate`")
    return Plan.from_dict(data)


def plan(
    action: Annotated[str, typer.Argument(help="show or diff.")],
    path: Annotated[Path, typer.Argument(help="A plan, or the directory of a model that carries one.")],
    other: Annotated[Path | None, typer.Argument(help="The second plan of diff.")] = None,
    png: Annotated[Path | None, typer.Option(help="Also write the picture of show to this file.")] = None,
) -> None:
    """Show a plan as a picture of layers by heads, or what two plans differ in."""
    console, errors = Console(), Console(stderr=True)
    try:
        if action not in ("show", "diff"):
            raise PlanError(f"action is {action!r}, expected show or diff")
        if (action == "diff") != (other is not None):
            raise PlanError("diff takes two plans, show takes one")
        first = read_plan(path)
        if other is None:
            console.print(heat_map(first))
            for line in summary(first):
                console.print(line, markup=False, highlight=False)
            if png is not None:
                save_png(first, png)
            return
        changed = differences(first, read_plan(other))
    except PlanError as error:
        errors.print(f"error: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(2) from error
    for layer, head, left, right in changed:
        console.print(
            f"layer {layer} head {head}: {left.label} -> {right.label}", markup=False, highlight=False
        )
    console.print(f"{len(changed)} units differ", markup=False, highlight=False)
