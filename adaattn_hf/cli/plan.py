"""`adaattn plan`: shows a plan as a picture, compares two plans, and draws what other budgets would buy."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from .._files import write_atomically
from ..errors import UsageError
from .interrupt import leave, of_file
from .place import PLAN_DIRECTORY
from .shown import tell

if TYPE_CHECKING:  # what loads torch is imported when a command runs, not when its help is asked for
    from ..plans.plan import Plan

app = typer.Typer(
    add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False, no_args_is_help=True
)
PlanPath = Annotated[Path, typer.Argument(help="A plan, or the directory of a model that carries one.")]
OwnPath = Annotated[
    Path | None,
    typer.Argument(
        help=f"A plan, the directory that `adaattn calibrate` wrote, or a model that carries a plan. Default: "
        f"{PLAN_DIRECTORY}."
    ),
]
AsPlan = Annotated[Path | None, typer.Option("--plan", help="The same, as other commands name it.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a picture.")]


@app.callback()
def plan() -> None:
    """Show a plan as a picture of layers by heads, or what two plans differ in."""


@app.command()
def show(
    path: OwnPath = None,
    plan: AsPlan = None,
    png: Annotated[Path | None, typer.Option(help="Also write the picture to this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Also draw it on this page.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print nats, levels and versions, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show a plan as a picture of layers by heads, with what it costs and buys.

    Files are written before anything is printed. Exit codes: 0 done; 2 wrong arguments, or no plan.
    """
    from ..plans.plan import PlanError
    from ..plans.reading import read_plan
    from .pictures.grid import save_png
    from .pictures.headline import bought
    from .pictures.page import plan_page
    from .printed import print_plan

    place = path or plan or Path(PLAN_DIRECTORY)
    try:
        _refuse_both(path, plan)
        if png is not None and importlib.util.find_spec("matplotlib") is None:
            raise UsageError("--png needs matplotlib; pip install matplotlib")
        shown, buys = read_plan(place), bought(place)
        if png is not None:
            _draw("--png", png, lambda path: save_png(shown, path))
        if html is not None:
            _draw("--html", html, _page(plan_page(shown, buys)))
    except (PlanError, UsageError) as error:
        leave(UsageError(str(error)))
    except OSError as error:
        leave(UsageError(of_file(error, place)))
    if as_json:
        typer.echo(shown.to_json())
        return
    print_plan(Console(), shown, buys, verbose)


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
    from ..plans.plan import PlanError
    from ..plans.reading import read_plan
    from ..plans.wording import legend
    from .pictures.grid import differences
    from .pictures.page import compared

    try:
        plans = [read_plan(path), read_plan(other)]
        changed = differences(*plans)
        numbers = [_numbers(one) for one in plans]
        if html is not None:
            names = [f"first: {path.name}", f"second: {other.name}"]
            line = f"{path} and {other}: {len(changed)} heads differ"
            _draw("--html", html, _page(compared([*zip(names, plans, strict=True)], line)))
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
    console = Console()
    for layer, head, left, right in changed:
        tell(console, f"layer {layer} head {head}: {left.label} -> {right.label}")
    means = legend(choice for _, _, *both in changed for choice in both)
    for line in (*([means] if means else []), f"{len(changed)} heads differ"):
        tell(console, line)
    for name, first, second in zip(numbers[0], *(_words(one).values() for one in numbers), strict=True):
        tell(console, f"{name}: {first} -> {second}")


@app.command()
def explore(
    path: OwnPath = None,
    *,
    plan: AsPlan = None,
    html: Annotated[Path, typer.Option(help="The page to write.")],
    name: Annotated[
        str | None, typer.Option(help="Name of the model in the heading. Default: the plan's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what the page shows as JSON, too.")] = False,
) -> None:
    """Draw what every budget would buy: a page with a slider from exact to the cheapest plan.

    Plans are the solver's, by the table that it used. Predicted losses are sums of the risks that calibration measured,
    re-scaled by the loss of whole plans; what was proved on held-out text is marked. The page needs no network.

    Exit codes: 0 done; 2 wrong arguments, no plan, or no report beside it.
    """
    from ..plans.plan import PlanError
    from ..plans.reading import read_plan
    from ..plans.wording import at_most, rise, share, times
    from ..policy.table import SolverTable
    from .pictures.explorer import explorer
    from .pictures.headline import REPORT_FILE, bought
    from .pictures.page import page

    place = path or plan or Path(PLAN_DIRECTORY)
    try:
        _refuse_both(path, plan)
        shown = read_plan(place)
        report = (place if place.is_dir() else place.parent) / REPORT_FILE
        if not report.is_file():
            raise PlanError(
                f"{report} does not exist; expected what `adaattn calibrate` leaves beside a plan"
            )
        found = json.loads(report.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or "table" not in found:
            raise PlanError(f"{report} holds no table of risks and prices; calibrate again with this version")
        data = explorer(SolverTable.from_dict(found["table"]), shown, bought(place), name)
        _draw("--html", html, _page(page(data)))
    except (PlanError, UsageError) as error:
        leave(UsageError(str(error)))
    except OSError as error:
        leave(UsageError(of_file(error, place)))
    except ValueError as error:
        leave(UsageError(f"{report}: {error}"))
    if as_json:
        typer.echo(json.dumps(data))
        return
    console = Console()
    for stop in data["stops"]:
        proved = f", proved at most {at_most(stop['proof']['upper'])}" if stop["proof"] else ""
        cache = f", cache {share(stop['memory'])} of the bytes" if stop["memory"] is not None else ""
        speed = f"attention {times(stop['speed'])} times as fast{cache}"
        tell(console, f"{stop['name']:>24}: predicted increase {rise(stop['loss'])}{proved}, {speed}")
    tell(console, f"page: {html}")


def _refuse_both(path: Path | None, plan: Path | None) -> None:
    if path is not None and plan is not None:
        raise UsageError(f"plan: got {path} and --plan {plan}, expected one of them; leave one out")


def _numbers(plan: Plan) -> dict[str, float | None]:
    """What a plan costs and buys."""
    from ..plans.wording import quotient

    return {
        "budget, nats/token": plan.budget,
        "predicted increase, nats/token": plan.predicted_loss,
        "proved increase, at most, nats/token": plan.verified.upper if plan.verified else None,
        "attention of planned layers, times as fast": quotient(
            [u.exact_price for u in plan.units], [u.price for u in plan.units]
        )
        if plan.units
        else 1.0,
        "heads that are not exact": sum(not c.is_exact for layer in plan.layers for c in layer.choices),
    }


def _words(numbers: Mapping[str, float | None]) -> dict[str, str]:
    """The same as people read it."""
    from ..plans.wording import allowed, at_most, in_nats, rise, times

    def word(name: str, value: float | None) -> str:
        if value is None:
            return "none"
        if name.endswith("nats/token"):
            percent = allowed if name.startswith("budget") else at_most if "at most" in name else rise
            return f"{percent(value)} ({in_nats(value)})"
        return times(value) if "times" in name else f"{value:g}"

    return {name: word(name, value) for name, value in numbers.items()}


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
