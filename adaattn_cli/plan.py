"""`adaattn plan`: shows a plan as a picture, compares two, writes one for others, and draws what budgets would buy."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from adaattn_hf._files import parse_json, write_atomically
from adaattn_hf.errors import UsageError
from adaattn_hf.eval.progress import tell
from adaattn_hf.plans.limits import unproven
from adaattn_hf.plans.plan import Plan, PlanError
from adaattn_hf.plans.store import PLAN_FILE, text_file
from adaattn_hf.plans.wording import allowed, at_most, in_nats, legend, rise, share, times
from adaattn_hf.policy.table import SolverTable

from .commands import Diff, Explore, Show
from .ending import ending
from .options import PLAN_DIRECTORY, Done
from .pictures.grid import differences, png, print_plan
from .pictures.headline import REPORT_FILE, bought, speed_of
from .pictures.page import compared, explorer, page, plan_page


def show(options: Show) -> Done:
    """Prints a plan and draws it, or returns it."""
    with ending(default=options.path or PLAN_DIRECTORY, wrong=(PlanError, OSError)):
        place = _place(options.path)
        if options.png is not None and importlib.util.find_spec("matplotlib") is None:
            raise UsageError("--png needs matplotlib; pip install matplotlib")
        plan, buys = Plan.from_pretrained(place), bought(place)
        if options.png is not None:
            _draw("--png", options.png, png(plan, buys))
        if options.html is not None:
            _draw("--html", options.html, plan_page(plan, buys))
    if not options.as_json:
        print_plan(Console(), plan, buys, options.verbose)
    return Done(plan.to_json())


def diff(options: Diff) -> Done:
    """Prints what differs between two plans and draws both, or returns it."""
    path, other = options.path, options.other
    with ending(default=path, wrong=(PlanError, OSError)):
        plans = [Plan.from_pretrained(path), Plan.from_pretrained(other)]
        changed = differences(*plans)
        figures = [_figures(one) for one in plans]
        if options.html is not None:
            named = ((f"first: {path.name}", bought(path)), (f"second: {other.name}", bought(other)))
            pairs = [(*about, one) for about, one in zip(named, plans, strict=True)]
            _draw("--html", options.html, compared(pairs, f"heads that differ: {len(changed)}"))
    if options.as_json:
        units = [
            {"layer": layer, "head": head, "first": left.to_dict(), "second": right.to_dict()}
            for layer, head, left, right in changed
        ]
        return Done({"plans": [{name: number for name, (number, _) in one.items()} for one in figures], "units": units})
    console = Console()
    for layer, head, left, right in changed:
        tell(console, f"layer {layer} head {head}: {left.label} -> {right.label}")
    means = legend(choice for _, _, *both in changed for choice in both)
    for line in filter(None, (means, f"{len(changed)} heads differ")):
        tell(console, line)
    for name, (_, words) in figures[0].items():
        tell(console, f"{name}: {words} -> {figures[1][name][1]}")
    return Done()


def explore(options: Explore) -> Done:
    """Writes the page, and prints its budgets or returns its data."""
    with ending(default=options.path or PLAN_DIRECTORY, wrong=(PlanError, OSError)):
        place = _place(options.path)
        plan, buys = Plan.from_pretrained(place), bought(place)
        report = (place if place.is_dir() else place.parent) / REPORT_FILE
        if not report.is_file():
            raise PlanError(f"{report} does not exist; expected what `adaattn calibrate` leaves beside a plan")
        try:
            found = parse_json(text_file(report))
            if not isinstance(found, dict) or "table" not in found:
                raise ValueError("it holds no table of risks and prices; calibrate again with this version")
            data = explorer(SolverTable.from_dict(found["table"]), plan, buys, options.name)
        except ValueError as error:
            raise UsageError(f"{report}: {error}") from error
        _draw("--html", options.html, page(data))
    if options.as_json:
        return Done(data)
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
    return Done()


def _place(path: Path | None) -> Path:
    own = Path(PLAN_DIRECTORY)
    if path is None and not any(own.rglob(PLAN_FILE)):
        raise UsageError(f"plan: no plan in {own}; run `adaattn calibrate MODEL`, or name another directory")
    return path or own


def _figures(plan: Plan) -> dict[str, tuple[float | None, str]]:
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
