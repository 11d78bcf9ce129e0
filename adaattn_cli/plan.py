"""`adaattn plan`: shows a plan as a picture, and draws what other budgets would buy."""

from pathlib import Path

from rich.console import Console

from adaattn_hf._files import parse_json, write_atomically
from adaattn_hf.errors import UsageError
from adaattn_hf.eval.progress import tell
from adaattn_hf.plans.plan import Plan, PlanError
from adaattn_hf.plans.store import text_file
from adaattn_hf.plans.wording import at_most, rise, share, times
from adaattn_hf.policy.knapsack import SolverTable

from .ending import ending, writable
from .job import default_plan
from .options import PLAN_DIRECTORY, Done, Options
from .pictures.headline import REPORT_FILE, Speedups, print_plan, speedups_beside
from .pictures.page import explorer, page, plan_page


def show(options: Options) -> Done:
    """Prints a plan and draws it, or returns it."""
    with ending(default=options.path or PLAN_DIRECTORY, wrong=(PlanError, OSError)):
        _, plan, speedups = _opened(options.path)
        if options.html is not None:
            _draw(options.html, plan_page(plan, speedups))
    if not options.as_json:
        print_plan(Console(), plan, speedups, options.verbose)
    return Done(plan.to_json())


def explore(options: Options) -> Done:
    """Writes the page, and prints its budgets or returns its data."""
    with ending(default=options.path or PLAN_DIRECTORY, wrong=(PlanError, OSError)):
        place, plan, speedups = _opened(options.path)
        report = (place if place.is_dir() else place.parent) / REPORT_FILE
        if not report.is_file():
            raise PlanError(f"{report} does not exist; expected what `adaattn calibrate` leaves beside a plan")
        try:
            content = parse_json(text_file(report))
            if not isinstance(content, dict) or "table" not in content:
                raise ValueError("it holds no table of risks and prices; calibrate again with this version")
            data = explorer(SolverTable.from_dict(content["table"]), plan, speedups, options.name or "")
        except ValueError as error:
            raise UsageError(f"{report}: {error}") from error
        _draw(options.html, page(data))
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
        smaller = "your plan is smaller than predictions allow: its upper bound on held-out text keeps the budget, too"
        tell(console, smaller)
    return Done()


def _opened(path: Path | None) -> tuple[Path, Plan, Speedups]:
    """Where a plan lies, the plan, and what the report beside it says of it."""
    place = path or default_plan()
    return place, Plan.from_pretrained(place), speedups_beside(place)


def _draw(target: Path, drawn: str) -> None:
    writable(target.parent, "html")
    write_atomically(target, drawn)
    tell(Console(stderr=True), f"written: {target}")
