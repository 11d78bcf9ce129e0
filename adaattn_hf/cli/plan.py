"""`adaattn plan`: shows a plan as a picture, compares two, writes one for others, and draws what budgets would buy."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from adaattn_hf.eval.progress import tell

from .._files import parse_json, write_atomically
from ..errors import UsageError
from .interrupt import ending
from .json_output import AsJson, print_json
from .options import Verbose
from .place import PLAN_DIRECTORY

if TYPE_CHECKING:  # what loads torch is imported when a command runs, not when its help is asked for
    from ..plans.plan import Plan

app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False, no_args_is_help=True)
A_PLAN = "A plan (file, directory or id of the Hub), or the directory of a model that carries one."
PlanPath = Annotated[Path, typer.Argument(help=A_PLAN)]
OwnPath = Annotated[Path | None, typer.Argument(help=f"{A_PLAN} Default: {PLAN_DIRECTORY}.")]


@app.callback()
def plan() -> None:
    """Show a plan, compare two, or explore other budgets."""


@app.command()
def show(
    path: OwnPath = None,
    png: Annotated[Path | None, typer.Option(help="Also save the picture to this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Also write an HTML page.")] = None,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Show a plan as a picture of layers by heads, with its loss and speed.

    Exit codes: 0 done; 2 wrong arguments, or no plan.
    """
    from ..plans.plan import Plan, PlanError
    from .pictures.grid import png as png_of
    from .pictures.grid import print_plan
    from .pictures.headline import bought
    from .pictures.page import plan_page

    with ending(default=path or PLAN_DIRECTORY, wrong=(PlanError, OSError)):
        place = _place(path)
        if png is not None and importlib.util.find_spec("matplotlib") is None:
            raise UsageError("--png needs matplotlib; pip install matplotlib")
        shown, buys = Plan.from_pretrained(place), bought(place)
        if png is not None:
            _draw("--png", png, png_of(shown, buys))
        if html is not None:
            _draw("--html", html, plan_page(shown, buys))
    if as_json:
        typer.echo(shown.to_json())
        return
    print_plan(Console(), shown, buys, verbose)


@app.command()
def diff(
    path: PlanPath,
    other: PlanPath,
    html: Annotated[Path | None, typer.Option(help="Also write an HTML page with both plans.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the heads that differ between two plans, with the loss and speed of each plan.

    Exit codes: 0 done; 2 wrong arguments, or no plan.
    """
    from ..plans.plan import Plan, PlanError
    from ..plans.wording import legend
    from .pictures.grid import differences
    from .pictures.headline import bought
    from .pictures.page import compared

    with ending(default=path, wrong=(PlanError, OSError)):
        plans = [Plan.from_pretrained(path), Plan.from_pretrained(other)]
        changed = differences(*plans)
        figures = [_figures(one) for one in plans]
        if html is not None:
            named = ((f"first: {path.name}", bought(path)), (f"second: {other.name}", bought(other)))
            pairs = [(*about, one) for about, one in zip(named, plans, strict=True)]
            _draw("--html", html, compared(pairs, f"heads that differ: {len(changed)}"))
    if as_json:
        units = [
            {"layer": layer, "head": head, "first": left.to_dict(), "second": right.to_dict()}
            for layer, head, left, right in changed
        ]
        numbers = [{name: number for name, (number, _) in one.items()} for one in figures]
        print_json({"plans": numbers, "units": units})
        return
    console = Console()
    for layer, head, left, right in changed:
        tell(console, f"layer {layer} head {head}: {left.label} -> {right.label}")
    means = legend(choice for _, _, *both in changed for choice in both)
    for line in filter(None, (means, f"{len(changed)} heads differ")):
        tell(console, line)
    for name, (_, words) in figures[0].items():
        tell(console, f"{name}: {words} -> {figures[1][name][1]}")


@app.command()
def explore(
    path: OwnPath = None,
    *,
    html: Annotated[Path, typer.Option(help="HTML page to write.")],
    name: Annotated[str | None, typer.Option(help="Name of the model in the heading. Default: the plan's.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a page with a slider over budgets, from exact to the fastest plan.

    It shows the plan that the solver would choose for each budget. Losses are predicted from the risks that calibration
    measured; what was verified on held-out text is marked. The page works offline.

    Exit codes: 0 done; 2 wrong arguments, no plan, or no report next to it.
    """
    from ..plans.plan import Plan, PlanError
    from ..plans.store import text_file
    from ..plans.wording import at_most, rise, share, times
    from ..policy.table import SolverTable
    from .pictures.explorer import explorer
    from .pictures.headline import REPORT_FILE, bought
    from .pictures.page import page

    with ending(default=path or PLAN_DIRECTORY, wrong=(PlanError, OSError)):
        place = _place(path)
        shown, buys = Plan.from_pretrained(place), bought(place)
        report = (place if place.is_dir() else place.parent) / REPORT_FILE
        if not report.is_file():
            raise PlanError(f"{report} does not exist; expected what `adaattn calibrate` leaves beside a plan")
        try:
            found = parse_json(text_file(report))
            if not isinstance(found, dict) or "table" not in found:
                raise ValueError("it holds no table of risks and prices; calibrate again with this version")
            data = explorer(SolverTable.from_dict(found["table"]), shown, buys, name)
        except ValueError as error:
            raise UsageError(f"{report}: {error}") from error
        _draw("--html", html, page(data))
    if as_json:
        print_json(data)
        return
    console = Console()
    tell(console, f"{'predicted within':>24}")
    for stop in data["stops"]:
        verified = f", verified at most {at_most(stop['proof']['upper'])}" if stop["proof"] else ""
        cache = f", cache {share(stop['memory'])} of the bytes" if stop["memory"] is not None else ""
        speed = f"attention {times(stop['speed'])} times as fast{cache}"
        tell(console, f"{stop['name']:>24}: predicted increase {rise(stop['loss'])}{verified}, {speed}")
    if any(stop["proof"] for stop in data["stops"]):
        tell(
            console,
            "your plan is smaller than predictions allow: its upper bound on held-out text keeps the budget, too",
        )


def _place(path: Path | None) -> Path:
    from ..plans.store import PLAN_FILE

    own = Path(PLAN_DIRECTORY)
    if path is None and not any(own.rglob(PLAN_FILE)):
        raise UsageError(f"plan: no plan in {own}; run `adaattn calibrate MODEL`, or name another directory")
    return path or own


def _figures(plan: Plan) -> dict[str, tuple[float | None, str]]:
    from ..plans.limits import unproven
    from ..plans.wording import allowed, at_most, in_nats, rise, times
    from .pictures.headline import speed_of

    def nats(value: float | None, percent: Callable[[float], str]) -> tuple[float | None, str]:
        return value, "none" if value is None else f"{percent(value)} ({in_nats(value)})"

    speed, believed = speed_of(plan) if plan.units else 1.0, None if unproven(plan) else plan.verified
    changed = sum(not c.is_exact for layer in plan.layers for c in layer.choices)
    return {
        "budget, nats/token": nats(plan.budget, allowed),
        "predicted increase, nats/token": nats(plan.predicted_loss, rise),
        "verified increase, at most, nats/token": nats(believed.upper if believed else None, at_most),
        "attention, times as fast": (speed, "none" if speed is None else times(speed)),
        "heads that are not exact": (changed, f"{changed:g}"),
    }


def _draw(name: str, target: Path, drawn: bytes | str) -> None:
    if not target.parent.is_dir():
        raise UsageError(
            f"{name}: the directory {target.parent} does not exist; make it, or give a file in one that does"
        )
    try:
        write_atomically(target, drawn)
    except OSError as error:
        raise UsageError(
            f"{name}: {target} cannot be written ({error.strerror}); give a file in a directory that can"
        ) from error
    tell(Console(stderr=True), f"written: {target}")
