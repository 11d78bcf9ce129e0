"""`adaattn plan`: shows a plan as a picture, compares two plans, and draws what other budgets would buy."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from .._files import write_atomically
from ..errors import UsageError
from .interrupt import leave, of_file

if TYPE_CHECKING:  # what loads torch is imported when a command runs, not when its help is asked for
    from ..plans.plan import Plan

app = typer.Typer(
    add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False, no_args_is_help=True
)
PlanPath = Annotated[Path, typer.Argument(help="A plan, or the directory of a model that carries one.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a picture.")]


@app.callback()
def plan() -> None:
    """Show a plan as a picture of layers by heads, or what two plans differ in."""


@app.command()
def show(
    path: PlanPath,
    png: Annotated[Path | None, typer.Option(help="Also write the picture to this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Also draw it on this page.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show a plan as a picture of layers by heads, with its budget and its proof.

    Files are written before anything is printed. Exit codes: 0 done; 2 wrong arguments, or no plan.
    """
    from ..plans.page import plan_page
    from ..plans.plan import PlanError
    from ..plans.render import heat_map, save_png, summary
    from ..plans.store import read_plan

    try:
        if png is not None and importlib.util.find_spec("matplotlib") is None:
            raise UsageError("--png needs matplotlib; pip install matplotlib")
        shown = read_plan(path)
        if png is not None:
            _draw("--png", png, lambda path: save_png(shown, path))
        if html is not None:
            _draw("--html", html, _page(plan_page(shown)))
    except (PlanError, UsageError) as error:
        leave(UsageError(str(error)))
    except OSError as error:
        leave(UsageError(of_file(error, path)))
    if as_json:
        typer.echo(shown.to_json())
        return
    console = Console()
    console.print(heat_map(shown))
    for line in summary(shown):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


@app.command()
def diff(
    path: PlanPath,
    other: PlanPath,
    html: Annotated[Path | None, typer.Option(help="Also draw both plans on this page.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the heads that two plans treat differently, and what each plan loses and buys.

    Exit codes: 0 done; 2 wrong arguments, or no plan.
    """
    from ..plans.page import compared
    from ..plans.plan import PlanError
    from ..plans.render import differences
    from ..plans.store import read_plan

    try:
        plans = [read_plan(path), read_plan(other)]
        changed = differences(*plans)
        numbers = [_numbers(one) for one in plans]
        if html is not None:
            names = [f"first: {path.name}", f"second: {other.name}"]
            lines = [f"{path} and {other}: {len(changed)} heads differ"]
            _draw("--html", html, _page(compared([*zip(names, plans, strict=True)], lines)))
    except (PlanError, UsageError) as error:
        leave(UsageError(str(error)))
    except OSError as error:
        leave(UsageError(of_file(error, path)))
    if as_json:
        units = [
            {"layer": layer, "head": head, "first": left.to_dict(), "second": right.to_dict()}
            for layer, head, left, right in changed
        ]
        typer.echo(json.dumps({"plans": numbers, "units": units}, indent=2))
        return
    for layer, head, left, right in changed:
        typer.echo(f"layer {layer} head {head}: {left.label} -> {right.label}")
    typer.echo(f"{len(changed)} units differ")
    for name, first, second in zip(numbers[0], *(one.values() for one in numbers), strict=True):
        typer.echo(f"{name}: {_shown(first)} -> {_shown(second)}")


@app.command()
def explore(
    path: Annotated[
        Path, typer.Argument(help="The directory that `adaattn calibrate` wrote, or the plan in it.")
    ],
    html: Annotated[Path, typer.Option(help="The page to write.")],
    name: Annotated[
        str | None, typer.Option(help="Name of the model in the heading. Default: its model type.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what the page shows as JSON, too.")] = False,
) -> None:
    """Draw what every budget would buy: a page with a slider from exact to the cheapest plan.

    Plans are the solver's, by the table that it used. Predicted losses are sums of the risks that calibration measured,
    re-scaled by the loss of whole plans; what was proved on held-out text is marked. The page needs no network.

    Exit codes: 0 done; 2 wrong arguments, no plan, or no report beside it.
    """
    from ..plans.page import page
    from ..plans.plan import PlanError
    from ..plans.render import facts
    from ..plans.store import read_plan
    from ..policy.explore import SolverTable, explorer

    try:
        shown = read_plan(path)
        report = (path if path.is_dir() else path.parent) / "adaattn_report.json"
        if not report.is_file():
            raise PlanError(
                f"{report} does not exist; expected what `adaattn calibrate` leaves beside a plan"
            )
        found = json.loads(report.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or "table" not in found:
            raise PlanError(f"{report} holds no table of risks and prices; calibrate again with this version")
        data = explorer(SolverTable.from_dict(found["table"]), shown, facts(shown), name)
        _draw("--html", html, _page(page(data)))
    except (PlanError, UsageError) as error:
        leave(UsageError(str(error)))
    except OSError as error:
        leave(UsageError(of_file(error, path)))
    except ValueError as error:
        leave(UsageError(f"{report}: {error}"))
    if as_json:
        typer.echo(json.dumps(data))
        return
    for stop in data["stops"]:
        proved = f", proved at most {stop['proof']['upper']:.2e}" if stop["proof"] else ""
        cache = f", cache {stop['memory']:.0%}" if stop["memory"] is not None else ""
        typer.echo(
            f"{stop['name']:>24}: predicted loss {stop['loss']:.2e} nats/token{proved}, attention {stop['speed']:.2f} "
            f"times as fast{cache}"
        )
    typer.echo(f"page: {html}")


def _numbers(plan: Plan) -> dict[str, float | None]:
    """What a plan loses and buys."""
    price = sum(unit.price for unit in plan.units)
    return {
        "budget, nats/token": plan.budget,
        "predicted loss, nats/token": plan.predicted_loss,
        "proved loss, at most, nats/token": plan.verified.upper if plan.verified else None,
        "attention of planned layers, times as fast": sum(u.exact_price for u in plan.units) / price
        if price
        else 1.0,
        "heads that are not exact": sum(not c.is_exact for layer in plan.layers for c in layer.choices),
    }


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"


def _draw(name: str, target: Path, draw: Callable[[Path], None]) -> None:
    if not target.parent.is_dir():
        raise UsageError(
            f"{name}: the directory {target.parent} does not exist; make it, or give a file in one that does"
        )
    try:
        draw(target)
    except OSError as error:
        raise UsageError(
            f"{name}: {target} cannot be written ({error.strerror}); give a file in a directory that can"
        ) from error


def _page(text: str) -> Callable[[Path], None]:
    return lambda path: write_atomically(path, text)
